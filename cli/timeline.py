"""The timeline of a request as text: a line for each run of a stage, or for each job, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spillway_client import RequestTimeline, StageRun

WIDTH = 40


def lines(told: RequestTimeline) -> Iterator[str]:
    """Yield the lines: name, begin and length in milliseconds, and a bar; runs in the order in which they began."""
    runs = told.stages or [_run(job, told) for job in told.jobs[1:] or told.jobs]
    runs = sorted(runs, key=lambda run: (run.start_ms, run.end_ms))
    length = max((run.end_ms for run in runs), default=0.0)
    shared = overlap_ms(runs)
    state = told.jobs[0]["state"] if told.jobs else "unknown"
    together = f", {shared:,.0f} ms of which several ran at once" if shared else ""
    yield f"{told.id}: {state}, {length:,.0f} ms{together}"
    for run in runs:
        name = f"{run.name} {run.nth + 1}" if run.nth else run.name
        took = run.end_ms - run.start_ms
        yield f"  {name:<14}{run.start_ms:>9,.0f} {took:>9,.0f} ms  |{_bar(run, length)}|"


def overlap_ms(runs: list[StageRun]) -> float:
    """Return the milliseconds during which at least two runs went on at once."""
    edges = sorted([(run.start_ms, 1) for run in runs] + [(run.end_ms, -1) for run in runs])
    total, running, before = 0.0, 0, 0.0
    for at, change in edges:
        if running > 1:
            total += at - before
        running, before = running + change, at
    return total


def _bar(run: StageRun, length: float) -> str:
    scale = WIDTH / length if length else 0.0
    first = min(WIDTH - 1, int(run.start_ms * scale))
    cells = max(1, min(WIDTH - first, round((run.end_ms - run.start_ms) * scale)))
    return " " * first + "=" * cells + " " * (WIDTH - first - cells)


def _run(job: dict[str, Any], told: RequestTimeline) -> StageRun:
    """Return a job as a run, from its admission to its end, or to now, counted from the request's own admission."""
    began = told.jobs[0]["events"][0]["at"]
    last = job["events"][-1]
    until = last["at"] if last["what"] == "ended" else told.now
    start = 1000 * (job["events"][0]["at"] - began)
    return StageRun(job["stage"], start, 1000 * (until - began), job["index"])
