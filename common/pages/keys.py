"""The keys of the pages Redis: 16 partitions by the first byte of a page's id, each under its own hash tag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from common.pages.identity import PageId

PARTITIONS = 16
GROUPS = 8  # layer groups that a model may have


class PageKey(NamedTuple):
    """One copy's name: the page's id, and the layer group whose layers it holds."""

    id: PageId
    group: int = 0

    @property
    def partition(self) -> int:
        """Number of the partition that holds the page."""
        return self.id[0] % PARTITIONS

    @property
    def member(self) -> str:
        """Name of the copy within its partition, `<id in hex>:<group>`."""
        return f"{self.id.hex()}:{self.group}"


def of_member(member: bytes, partition: int | None = None) -> PageKey:
    """Return the key of a name within a partition; ValueError if it is none, or one of another partition."""
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
    """Members by the time of their last use in ms."""
    return f"{_tag(partition)}:index"


def sizes(partition: int) -> str:
    """Member to `<bytes> <owner>`: what the server holds for its value, and whose that is, in hexadecimal digits."""
    return f"{_tag(partition)}:sizes"


def use(partition: int) -> str:
    """The sum of a partition's sizes."""
    return f"{_tag(partition)}:use"


def shares(partition: int) -> str:
    """Owner to the sum of its sizes in a partition."""
    return f"{_tag(partition)}:shares"


def limits(partition: int) -> str:
    """Owner to the bytes it may have in a partition, of those that have a limit."""
    return f"{_tag(partition)}:limits"


def pins(partition: int) -> str:
    """Members that are not evicted, by until when in ms."""
    return f"{_tag(partition)}:pins"


def disk(partition: int) -> str:
    """Member to when it expires (ms), of what kv_store has on its disk; gone soon after that kv_store is."""
    return f"{_tag(partition)}:disk"


VALUES = "{pages/*}:v:*"  # a pattern of all values
# What is asked of the one kv_store that keeps the pages.
KEEPER = f"{_tag(0)}:keeper"
LAST = f"{_tag(0)}:last"  # the directory, or the process without one, that was kept last: it may lack no erasure
RECALL = f"{_tag(0)}:recall"  # members to bring from disk
ERASE = f"{_tag(0)}:erase"  # members to erase from disk
ERASED = (
    f"{_tag(0)}:erased"  # a stream: one entry whenever the keeper has erased what it was asked to
)
# `<partition>:<bytes>[:<owner>]`: what was put where there, or within its owner's limit, is little room.
ROOM = f"{_tag(0)}:room"


def by_partition(keys: Iterable[PageKey]) -> dict[int, list[PageKey]]:
    """Group keys by where they lie."""
    found: dict[int, list[PageKey]] = {}
    for key in keys:
        found.setdefault(key.partition, []).append(key)
    return found
