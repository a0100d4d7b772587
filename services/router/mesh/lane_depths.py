"""Depths of families: the most items and tokens that one lane of a family may hold, as last seen on the bus."""

from __future__ import annotations


class LaneDepths:
    """The deepest lane of each family, by the family's name; `LaneMonitor` keeps it up to date."""

    def __init__(self) -> None:
        self._deepest: dict[str, tuple[int, int]] = {}

    def of(self, family: str) -> tuple[int, int] | None:
        """Return items and tokens of a family's deepest lane; None if no worker has stated a depth."""
        return self._deepest.get(family)

    def note(self, family: str, depths: list[tuple[int, int]]) -> None:
        """Record the depths, in items and tokens, of a family's lanes; an empty list removes the family."""
        if depths:
            items, tokens = zip(*depths, strict=True)
            self._deepest[family] = (max(items), max(tokens))
        else:
            self._deepest.pop(family, None)
