"""Reconciliation of the pages Redis: corrects indexes and counts after expiries, or after a restart with old data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from msgspec import Struct

from common.pages import keys as names
from common.pages.keys import PARTITIONS, PageKey, of_member
from common.pages.store import PageStore

_AT_ONCE = 500
Skipped = Callable[[str], None]
T = TypeVar("T")


class Reconciled(Struct):
    """The faults found: entries with expired values, values without entries, miscounted bytes, forgotten members."""

    expired: int = 0
    unindexed: int = 0
    miscounted: int = 0
    forgotten: int = 0


async def reconcile(store: PageStore, skipped: Skipped) -> Reconciled:
    """Remove entries without values and values without entries, and recount all. Raises TierDown.

    Members that name no page are removed from the indexes and reported to `skipped`. Values with such names are
    reported, too, but stay.
    """
    done = Reconciled()
    for at in range(PARTITIONS):
        members = await store.server.call("ZRANGE", names.index(at), 0, -1)
        keys, bad = _read(members, skipped, at)
        for some in _chunks(bad):
            await store.server.call("ZREM", names.index(at), *some)
        done.expired += await _forget_expired(store, keys)
    done.unindexed = await _remove_unindexed(store, skipped)
    for at in range(PARTITIONS):
        heads = (names.index(at), names.sizes(at), names.use(at), names.shares(at))
        _, difference, forgotten = await store.server.script("recount", heads, ())
        done.miscounted += abs(difference)
        done.forgotten += forgotten
    return done


def _read(
    members: Iterable[bytes], skipped: Skipped, partition: int | None = None
) -> tuple[list[PageKey], list[bytes]]:
    """Return the pages named by members, and the members that name no page."""
    keys, bad = [], []
    for member in members:
        try:
            keys.append(of_member(member, partition))
        except ValueError as error:
            skipped(str(error))
            bad.append(member)
    return keys, bad


async def _forget_expired(store: PageStore, keys: Iterable[PageKey]) -> int:
    forgotten = 0
    for some in _chunks(keys):
        there = await store.server.pipeline([("EXISTS", names.value(key)) for key in some])
        gone = [key for key, count in zip(some, there, strict=True) if count == 0]
        if gone:
            await store.remove(gone)
            forgotten += len(gone)
    return forgotten


async def _remove_unindexed(store: PageStore, skipped: Skipped) -> int:
    removed = 0
    for call in await store.server.callers():
        cursor: bytes | int = b"0"
        while True:
            cursor, found = await call("SCAN", cursor, "MATCH", names.VALUES, "COUNT", _AT_ONCE)
            keys, _ = _read((name.partition(b":v:")[2] for name in found), skipped)
            scores = await store.server.pipeline(
                [("ZSCORE", names.index(key.partition), key.member) for key in keys]
            )
            stray = [key for key, score in zip(keys, scores, strict=True) if score is None]
            if stray:
                await store.remove(stray)
                removed += len(stray)
            if cursor in {b"0", 0}:
                break
    return removed


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, _AT_ONCE)):
        yield some
