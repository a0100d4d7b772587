"""The map of a collection, joined from the parts that its shards have drawn, by pure functions."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Sequence
from math import fsum, sqrt
from typing import Any

import msgspec

from common.wire.search import MapPart, MapPoint


def shown_basis(basis: bytes) -> str | None:
    """Return the plane of a map in the form that clients get and send back; None without a plane."""
    return base64.urlsafe_b64encode(basis).decode() if basis else None


def collection_map(name: str, parts: Sequence[MapPart], sample: int) -> dict[str, Any]:
    """Return a collection's map; the first part is of the shard in whose plane all parts are drawn.

    Each shard contributes points in proportion to its rows, so that the map is a sample of all rows.
    """
    basis = parts[0].basis if parts else b""
    drawn = [part for part in parts if part.computed_ms]
    quotas = shares([part.rows for part in drawn], sample)
    points = [
        point for part, most in zip(drawn, quotas, strict=True) for point in part.points[:most]
    ]
    return {
        "object": "map",
        "collection": name,
        "basis": shown_basis(basis),
        "computed_at": min(part.computed_ms for part in drawn) / 1000 if drawn else None,
        "pending": any(part.pending for part in parts),
        "rows": sum(part.rows for part in drawn),
        "explained": round(parts[0].explained, 4) if drawn else None,
        "ranges": {"x": _range(p.x for p in points), "y": _range(p.y for p in points)},
        "points": msgspec.to_builtins(points),
    }


def shares(rows: Sequence[int], most: int) -> list[int]:
    """Return the number of points of each shard, at most `most` in all, in proportion to the shards' rows."""
    total = sum(rows)
    if total <= most:
        return list(rows)
    exact = [count * most / total for count in rows]
    given = [int(share) for share in exact]
    by_rest = sorted(range(len(rows)), key=lambda i: (given[i] - exact[i], i))
    for i in by_rest[: most - sum(given)]:
        given[i] += 1
    return given


def _range(values: Iterable[float]) -> list[float] | None:
    known = list(values)
    return [min(known), max(known)] if known else None


def positions(
    basis: bytes, points: Sequence[MapPoint | dict[str, float]], *, pending: bool = False
) -> dict[str, Any]:
    """Return the positions of `points` as a reply; with `pending` the reply says that there is no map yet."""
    return {
        "object": "list",
        "basis": shown_basis(basis),
        "pending": pending,
        "data": msgspec.to_builtins(points),
    }


def placed(basis: bytes, vector: bytes, metric: str) -> dict[str, float]:
    """Return the position of any vector in a plane, by the shards' own formula."""
    values, plane = array("f", vector), array("f", basis)
    size = len(values)
    norm = sqrt(fsum(value * value for value in values)) if metric == "cosine" else 1.0
    centred = [value / (norm or 1.0) - mean for value, mean in zip(values, plane, strict=False)]
    x, y = (
        fsum(a * b for a, b in zip(centred, plane[row * size :], strict=False)) for row in (1, 2)
    )
    return {"x": x, "y": y}
