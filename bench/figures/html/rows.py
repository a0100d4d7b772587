"""The HTML report of benchmark rows: tables beside plots, with command, date and machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures.figure import lowest
from bench.figures.html import charts
from loadgen.html.page import Page, figure, machine, table

TITLE = "Spillway: benchmarks"


def page(documents: Sequence[Mapping[str, Any]], title: str = TITLE) -> Page:
    """Return the report of these documents, in their order."""
    made = Page(title)
    if len(documents) > 1:
        made.text(
            "Ratios come from pairs of runs on the same work, in alternating order; intervals are bootstrap 95 %. "
            "“goal” and “must” say which level was reached; in the plots a goal is green, a must amber. Latency in an "
            "open loop counts from the moment a request was due."
        )
        rows = [
            [found["id"], found["title"], lowest(found), found["measured_at"][:10]]
            for found in documents
        ]
        made.beside([table(["row", "what", "reached", "measured"], rows)])
    for found in documents:
        _section(made, found)
    return made


def command(found: Mapping[str, Any]) -> str:
    """Return the command line that measures a document again."""
    seed = f" --seed {found['seed']}" if found["seed"] != 1 else ""
    count = f" --count {found['count']}" if found.get("count") is not None else ""
    quick = " --quick" if found["quick"] else ""
    return f"spillway bench {found['id']}{seed}{count}{quick} --json docs/benchmarks/{found['id']}.json"


def _section(made: Page, found: Mapping[str, Any]) -> None:
    made.heading(f"{found['id']}: {found['title']}", found["id"])
    if found["quick"]:
        made.text("A quick run: not for quoting.")
    if found["met"]:
        made.verdicts(found["met"])
    tables = [table(each["columns"], each["rows"], each["title"]) for each in found["tables"]]
    plots = [figure(title, svg) for title, svg in charts.of(found)]
    made.beside(tables, plots)
    made.points([*found["notes"], *(_rival(rival) for rival in found["rivals"])])
    made.command(command(found))
    state = ", with uncommitted changes" if found["dirty"] else ""
    where = machine(found["machine"])
    made.text(
        f"Measured {found['measured_at'][:10]} at commit {found['commit'][:12]}{state} on {where}.",
        muted=True,
    )


def _rival(rival: Mapping[str, Any]) -> str:
    if not rival["measured"]:
        return f"{rival['name']}: not measured"
    best = ", ".join(f"{name} {value}" for name, value in rival["best"].items())
    return f"{rival['name']} {rival['version']}: {len(rival['settings_tried'])} settings tried, best: {best}"
