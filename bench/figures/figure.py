"""One line of the summary: must, goal and measured figure of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.hot_path import stale

Found = Mapping[str, Any]
Tell = Callable[[Found], str]
NOT_THERE = "not measured anew"  # what a document of an earlier form of its row does not hold


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the summary: `ours` and `rival` read a document, `met` names its verdict there ("": the lowest)."""

    row: str
    what: str
    must: str
    goal: str
    ours: Tell
    met: str
    rival: Tell = lambda _found: "-"

    def cells(self, found: Found | None) -> list[str]:
        """Return the line; without a document it says that nothing was measured."""
        said = ["not measured", "-", "-"]
        if found is not None:
            met = found["met"].get(self.met, "-") if self.met else lowest(found)
            ours, rival = self.told(found)
            said = [ours, rival, "-" if ours == NOT_THERE else met]
        return [self.row, self.what, self.must, self.goal, *said]

    def told(self, found: Found) -> tuple[str, str]:
        """Return our figure and the rival's of a document; a stale row's may stand in tables of another form."""
        try:
            return self.ours(found), self.rival(found)
        except (LookupError, ValueError):
            if stale(found):
                return NOT_THERE, "-"
            raise


def lowest(found: Found) -> str:
    """Return the lowest level any verdict of a document reached; - if it has none."""
    words = set(found["met"].values())
    return next(
        (word for word in ("missed", "undecided", "must", "goal", "met") if word in words), "-"
    )


def at(found: Found, table: int, row: int, column: str) -> str:
    """Return one cell of a document's tables."""
    shown = found["tables"][table]
    cell: str = shown["rows"][row][shown["columns"].index(column)]
    return cell


def rows_where(found: Found, where: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the rows of any table that have these cells, by column."""
    rows = (
        dict(zip(table["columns"], cells, strict=True))
        for table in found["tables"]
        for cells in table["rows"]
    )
    return [row for row in rows if where.items() <= row.items()]
