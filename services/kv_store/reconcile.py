"""What the pages Redis says it holds is made true again: pages expire, and it may have restarted with old data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from common import log
from common.pages import keys as names
from common.pages.keys import PARTITIONS, PageKey, of_member
from common.pages.store import PageStore
from services.kv_store import metrics

_AT_ONCE = 500
_log = log.get("kv_store")


async def reconcile(store: PageStore) -> None:
    """Forget entries whose values are gone, remove values that no entry names, count all anew. Raises TierDown."""
    for at in range(PARTITIONS):
        members = await store.server.call("ZRANGE", names.index(at), 0, -1)
        await _forget_expired(store, [of_member(member) for member in members])
    await _remove_unindexed(store)
    wrong = forgotten = 0
    for at in range(PARTITIONS):
        keys = (names.index(at), names.sizes(at), names.use(at), names.shares(at))
        _, difference, members = await store.server.script("recount", keys, ())
        wrong, forgotten = wrong + abs(difference), forgotten + members
    metrics.RECONCILED.labels("miscounted").inc(wrong)
    if wrong or forgotten:
        _log.warning("pages_recounted", bytes=wrong, members=forgotten)


async def _forget_expired(store: PageStore, keys: Iterable[PageKey]) -> None:
    for some in _chunks(keys):
        there = await store.server.pipeline([("EXISTS", names.value(key)) for key in some])
        gone = [key for key, count in zip(some, there, strict=True) if count == 0]
        if gone:
            await store.remove(gone)
            metrics.RECONCILED.labels("expired").inc(len(gone))


async def _remove_unindexed(store: PageStore) -> None:
    for call in await store.server.callers():
        cursor: bytes | int = b"0"
        while True:
            cursor, found = await call("SCAN", cursor, "MATCH", names.VALUES, "COUNT", _AT_ONCE)
            keys = [of_member(name.partition(b":v:")[2]) for name in found]
            scores = await store.server.pipeline(
                [("ZSCORE", names.index(key.partition), key.member) for key in keys]
            )
            stray = [key for key, score in zip(keys, scores, strict=True) if score is None]
            if stray:
                await store.remove(stray)
                metrics.RECONCILED.labels("unindexed").inc(len(stray))
            if cursor in {b"0", 0}:
                break


def _chunks(keys: Iterable[PageKey]) -> Iterator[list[PageKey]]:
    rest = iter(keys)
    while some := list(islice(rest, _AT_ONCE)):
        yield some
