"""What belongs to some requests on the bus, and how much was looked at to find it."""

from __future__ import annotations

import re

from msgspec import Struct, field

CLAIMS, DEAD, JOURNAL, LANE = "idem:", ":dead", ":journal:", ":lane:"
STREAMS = (DEAD, JOURNAL, LANE)
_ULID = re.compile(r"(?<![0-9a-z])[0-9a-hjkmnp-tv-z]{26}(?![0-9a-z])")


class ScanResult(Struct):
    """Keys, stream entries (by stream, with their jobs) and claims; `scanned` keys were looked at, `read` by kind."""

    servers: int = 0
    scanned: int = 0
    keys: set[str] = field(default_factory=set)
    entries: dict[str, dict[bytes, str]] = field(default_factory=dict)
    claims: set[str] = field(default_factory=set)
    read: dict[str, int] = field(default_factory=lambda: dict.fromkeys((CLAIMS, *STREAMS), 0))
    walked: bool = False  # every key of every server was looked at, not only what the indexes name

    @property
    def count(self) -> int:
        """How many things were found."""
        return len(self.keys) + len(self.claims) + sum(map(len, self.entries.values()))

    def add(self, other: ScanResult) -> None:
        """Count what another look found, too."""
        self.keys |= other.keys
        self.claims |= other.claims
        for name, entries in other.entries.items():
            self.entries.setdefault(name, {}).update(entries)
        self.scanned += other.scanned
        self.walked |= other.walked
        for kind, count in other.read.items():
            self.read[kind] += count


def ulids_in(name: str) -> list[str]:
    """Return the ulids a key or an id holds."""
    return _ULID.findall(name)
