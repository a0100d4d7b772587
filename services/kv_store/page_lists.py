"""What the lists of the pages Redis ask of the keeper: pages by name, and room in a partition; nonsense is skipped."""

from __future__ import annotations

from collections.abc import Iterable

from common.bus import unreadable
from common.pages.identity import Owner
from common.pages.keys import GROUPS, PARTITIONS, PageKey, of_member
from services.kv_store.eviction import Asked

_OWNER = 8


def pages_of(members: Iterable[bytes]) -> list[PageKey]:
    """Return the pages named, each once; what names none is counted and logged."""
    keys = []
    for member in dict.fromkeys(members):
        try:
            key = of_member(member)
            if not 0 <= key.group < GROUPS:
                raise ValueError(f"page {member!r}: expected a group below {GROUPS}")
        except ValueError as error:
            unreadable.note("pages", str(error))
            continue
        keys.append(key)
    return keys


def room_of(words: Iterable[bytes]) -> Asked:
    """Return the largest page refused by (partition, owner or None); what says neither is counted and logged."""
    asked: dict[tuple[int, Owner | None], int] = {}
    for word in words:
        try:
            place, size = _room(word)
        except ValueError:
            unreadable.note("pages", f"{word[:80]!r}: expected <partition>:<bytes>[:<owner>]")
            continue
        asked[place] = max(asked.get(place, 0), size)
    return asked


def _room(word: bytes) -> tuple[tuple[int, Owner | None], int]:
    at, size, *owner = word.decode("ascii").split(":")
    whose = bytes.fromhex(owner[0]) if owner else None
    place = int(at), int(size)
    if not 0 <= place[0] < PARTITIONS or place[1] < 0 or len(owner) > 1:
        raise ValueError(word)
    if whose is not None and len(whose) != _OWNER:
        raise ValueError(word)
    return (place[0], whose), place[1]
