"""The keys of the pages Redis: 16 partitions by the first byte of a page's id, each under its own hash tag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from common.pages.identity import PageId

PARTITIONS = 16
GROUPS = 8  # layer groups that a model may have


class PageKey(NamedTuple):
    """The name of one copy: the page's id, and the layer group whose layers it holds."""

    id: PageId
    group: int = 0

    @property
    def partition(self) -> int:
        """The number of the page's partition."""
        return self.id[0] % PARTITIONS

    @property
    def member(self) -> str:
        """The name of the copy within its partition, `<id in hex>:<group>`."""
        return f"{self.id.hex()}:{self.group}"


def of_member(member: bytes, partition: int | None = None) -> PageKey:
    """Return the key for a member's name; ValueError if it is malformed or belongs to another `partition`."""
    text, _, group = member.decode("ascii").partition(":")
    found = bytes.fromhex(text)
    if len(found) != 16:
        raise ValueError(f"page {member!r}: expected 32 hexadecimal digits, ':' and a group")
    key = PageKey(found, int(group))
    if partition is not None and key.partition != partition:
        raise ValueError(f"page {member!r} in partition {partition}: expected {key.partition}")
    return key


def _tag(partition: int) -> str:
    return f"{{pages/{partition}}}"


def value(key: PageKey) -> str:
    """The page's bytes, with a time to live."""
    return f"{_tag(key.partition)}:v:{key.member}"


def index(partition: int) -> str:
    """Members, scored by the time of their last use (ms)."""
    return f"{_tag(partition)}:index"


def sizes(partition: int) -> str:
    """Member to `<bytes> <owner>`: the memory that its value takes, and its owner in hexadecimal digits."""
    return f"{_tag(partition)}:sizes"


def use(partition: int) -> str:
    """The sum of a partition's sizes."""
    return f"{_tag(partition)}:use"


def shares(partition: int) -> str:
    """Owner to the sum of its sizes in a partition."""
    return f"{_tag(partition)}:shares"


def limits(partition: int) -> str:
    """Owner to the bytes that it may have in a partition; owners without a limit are not listed."""
    return f"{_tag(partition)}:limits"


def pins(partition: int) -> str:
    """Members that are not evicted, scored by the time at which that ends (ms)."""
    return f"{_tag(partition)}:pins"


def disk(partition: int) -> str:
    """Member to its expiry (ms), for pages on the keeper's disk; the key expires soon after the keeper has died."""
    return f"{_tag(partition)}:disk"


VALUES = "{pages/*}:v:*"  # a pattern of all values
# The lease of the keeper (the one kv_store that makes room, erases and brings back pages), and the requests to it.
KEEPER = f"{_tag(0)}:keeper"
# The name of the last keeper's directory (of its process, if it has none): no other disk has followed all erasures.
LAST = f"{_tag(0)}:last"
RECALL = f"{_tag(0)}:recall"  # members to bring from disk
ERASE = f"{_tag(0)}:erase"  # members to erase from disk
# A stream that gets an entry whenever the keeper has erased requested pages.
ERASED = f"{_tag(0)}:erased"
# `<partition>:<bytes>[:<owner>]`: the size of a page that was put while its partition, or its owner's limit, was short.
ROOM = f"{_tag(0)}:room"


def by_partition(keys: Iterable[PageKey]) -> dict[int, list[PageKey]]:
    """Group keys by partition."""
    found: dict[int, list[PageKey]] = {}
    for key in keys:
        found.setdefault(key.partition, []).append(key)
    return found
