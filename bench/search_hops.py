"""The hops of one search through a real mesh, and the CPU time of each process that it passes.

Searches go one at a time, so a mark of any process belongs to the search during which it was made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from bench.hops import Hop, Times
from bench.mesh.stamped import Moments
from loadgen import stats

SEARCH_HOPS = (
    Hop("send", "client: request to the socket; router: bytes from the socket", "came"),
    Hop("HTTP", "router: head parsed, route found", "found"),
    Hop("parse and admit", "router: key, the collection's record, JSON body, room", "called"),
    Hop("hop", "router to vector_search: a frame over TCP", "taken"),
    Hop("batch", "vector_search: frame decoded, batch formed", "walked from"),
    Hop("search", "vector_search: the index", "walked"),
    Hop("passages", "vector_search: the hits' ids and passages as JSON", "shown"),
    Hop("encode", "vector_search: the result's frame", "replied"),
    Hop("hop back", "vector_search to router", "returned"),
    Hop("JSON", "router: hits to a response", "written"),
    Hop("receive", "router: response to the socket; client: response read", "done"),
)


def measure(asked: Sequence[tuple[float, float]], moments: Moments) -> Times:
    """Return the seconds of every hop for searches sent and answered at these moments, by `time.monotonic()`.

    A hop whose mark is missing has no time of its own: the next one holds it. A search without marks is left out.
    """
    marks = {stage: sorted(each.values()) for stage, each in moments.items()}
    times: Times = {hop.name: [] for hop in SEARCH_HOPS}
    for sent, done in asked:
        ends = [
            done if hop.ends == "done" else _first(marks.get(hop.ends, []), sent, done)
            for hop in SEARCH_HOPS
        ]
        if ends[0] is None:
            continue
        at = sent
        for hop, end in zip(SEARCH_HOPS, ends, strict=True):
            moment = at if end is None else max(at, end)
            times[hop.name].append(moment - at)
            at = moment
    return times


def _first(marks: Sequence[float], sent: float, done: float) -> float | None:
    """Return the first mark within a search."""
    place = bisect_left(marks, sent)
    return marks[place] if place < len(marks) and marks[place] <= done else None


def rows(times: Times) -> list[list[str]]:
    """Return the table's rows in the order of the path; the last one is their sum."""
    found = []
    for hop in SEARCH_HOPS:
        p, part = stats.percentiles(times[hop.name]), times[hop.name]
        found.append(
            [
                hop.name,
                hop.what,
                *(_us(each) for each in (sum(part) / len(part), p["p50"], p["p99"])),
            ]
        )
    whole = stats.percentiles([sum(parts) for parts in zip(*times.values(), strict=True)])
    return [
        *found,
        ["whole", "measured by the client", *(_us(whole[key]) for key in ("mean", "p50", "p99"))],
    ]


def cpu_rows(used_s: Mapping[str, float], searches: int) -> list[list[str]]:
    """Return what one search costs each process."""
    return [[name, _us(seconds / searches)] for name, seconds in used_s.items()]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"
