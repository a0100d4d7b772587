"""This router's counts of the last minutes: the growth of its metrics in that time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from common.clock import Clock
from services.router import metrics

EVERY_S = 5.0
KEPT = 60  # records of the metrics, so five minutes
MINUTE_S = 60.0
# The routes that run jobs; routes that only read the mesh are no load.
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v1/collections/{name}/search",
    "/v1/collections/{name}/documents",
)
_COUNTED = (
    metrics.ADMITTED,
    metrics.REQUESTS,
    metrics.DURATION,
    metrics.FIRST_TOKEN,
    metrics.PER_TOKEN,
    metrics.REFUSED,
)
_SHARES = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99}
Labels = tuple[tuple[str, str], ...]
Counts = dict[tuple[str, Labels], float]


class RecentCounts:
    """The router's metrics, recorded every EVERY_S seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notes: deque[tuple[float, Counts]] = deque(maxlen=KEPT + 1)
        self._used: dict[str, deque[float]] = {}

    def note(self) -> None:
        """Record the present metrics."""
        self._notes.append((self._clock.monotonic(), _counts()))
        shares = _shares()
        for lane, share in shares.items():
            self._used.setdefault(lane, deque(maxlen=KEPT)).append(share)
        for gone in set(self._used) - set(shares):
            del self._used[gone]

    def used(self, lane: str) -> list[float]:
        """Return the share of a lane's depth in use, 0..1 or more, at each recorded time, oldest first."""
        return [round(share, 4) for share in self._used.get(lane, ())]

    def summary(self) -> dict[str, Any]:
        """Return the requests answered and refused within the window, with the quantiles of their times."""
        seconds, gained = self._since(self._notes[0])
        return {
            "seconds": seconds,
            "routes": [_route(gained, route) for route in ROUTES if _answered(gained, route)],
            "first_token": list(_by_model(gained, "spillway_time_to_first_token_seconds")),
            "per_token": list(_by_model(gained, "spillway_time_per_output_token_seconds")),
            "refused": _by(gained, "spillway_refused_total", "reason"),
        }

    def minute(self) -> dict[str, Any]:
        """Return the jobs admitted, by lane, and the requests refused, by reason, within the last minute."""
        since_s = self._clock.monotonic() - MINUTE_S
        within = (note for note in self._notes if note[0] >= since_s)
        seconds, gained = self._since(next(within, self._notes[-1]))
        return {
            "seconds": seconds,
            "admitted": _by(gained, "spillway_admitted_total", "lane"),
            "refused": _by(gained, "spillway_refused_total", "reason"),
        }

    def _since(self, note: tuple[float, Counts]) -> tuple[float, Counts]:
        """Return the seconds since a record, and the growth of each metric in these seconds."""
        then, before = note
        gained = {key: value - before.get(key, 0.0) for key, value in _counts().items()}
        return round(self._clock.monotonic() - then, 3), gained


def _by(gained: Counts, name: str, label: str) -> list[dict[str, Any]]:
    """Return the growth of a counter for each value of its label, without values for which it did not grow."""
    return [
        {label: dict(labels)[label], "count": int(count)}
        for (found, labels), count in sorted(gained.items())
        if found == name and count > 0
    ]


def _counts() -> Counts:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in _COUNTED
        for family in metric.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def _shares() -> dict[str, float]:
    """Return the share of each lane's depth in use, by the scarcer unit."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for what, gauge in (("used", metrics.USED), ("depth", metrics.DEPTH)):
        for sample in next(iter(gauge.collect())).samples:
            lane = found.setdefault(sample.labels["lane"], {})
            lane.setdefault(sample.labels["unit"], {})[what] = sample.value
    return {
        name: max(
            unit.get("used", 0.0) / unit["depth"] if unit.get("depth") else 0.0
            for unit in lane.values()
        )
        for name, lane in found.items()
    }


def _matching(
    gained: Counts, name: str, **wanted: str
) -> Iterator[tuple[Mapping[str, str], float]]:
    for (found, labels), value in gained.items():
        if found == name and wanted.items() <= dict(labels).items():
            yield dict(labels), value


def _answered(gained: Counts, route: str) -> float:
    return sum(value for _, value in _matching(gained, "spillway_requests_total", route=route))


def _route(gained: Counts, route: str) -> dict[str, Any]:
    answered = list(_matching(gained, "spillway_requests_total", route=route))
    name = "spillway_request_duration_seconds"
    return {
        "route": route,
        "count": int(_answered(gained, route)),
        "refused": int(sum(n for labels, n in answered if labels["status"] in {"429", "503"})),
        "failed": int(sum(n for labels, n in answered if labels["status"] in {"500", "504"})),
        **_quantiles(_buckets(gained, name, route=route)),
    }


def _by_model(gained: Counts, name: str) -> Iterator[dict[str, Any]]:
    counts = sorted(
        (labels["model"], n) for labels, n in _matching(gained, f"{name}_count") if n > 0
    )
    for model, count in counts:
        yield {
            "model": model,
            "count": int(count),
            **_quantiles(_buckets(gained, name, model=model)),
        }


def _buckets(gained: Counts, name: str, **labels: str) -> dict[float, float]:
    """Return, by upper bound, the number of values up to that bound, over all series with these labels."""
    found: dict[float, float] = {}
    for own, value in _matching(gained, f"{name}_bucket", **labels):
        bound = float(own["le"])
        found[bound] = found.get(bound, 0.0) + value
    return dict(sorted(found.items()))


def _quantiles(buckets: dict[float, float]) -> dict[str, float | None]:
    return {name: quantile(buckets, share) for name, share in _SHARES.items()}


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return the value below which `share` of the counted values lies, None if there are none.

    `buckets` maps rising upper bounds to the number of values up to that bound. Values are assumed to be spread evenly
    within a bucket, and those above the last finite bound to be as large as that bound.
    """
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in buckets.items():
        if count >= share * total:
            if bound == float("inf"):
                break
            inside = (share * total - below) / max(count - below, 1e-9)
            return round(lower + (bound - lower) * inside, 6)
        lower, below = bound, count
    return lower
