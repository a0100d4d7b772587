"""The HTML report of one load run: latency, lateness, refusals, and all three over time."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from loadgen.chat.replies import REFUSED as REFUSED_CHAT
from loadgen.chat.replies import Goal, Reply
from loadgen.html import plots
from loadgen.html.page import Page, figure, machine, table
from loadgen.html.plots import Mark
from loadgen.load import REFUSED, RequestRun, Sample
from loadgen.machine import machine as describe_machine

T = TypeVar("T", Reply, Sample)
_KEY = "--key"
_MS = 1e3
SINCE = "seconds since the start"


@dataclass(frozen=True, slots=True)
class About:
    """The description of a run: its command (without the key), its time and its machine."""

    command: str
    at: str
    machine: dict[str, Any]

    @classmethod
    def now(cls, argv: Sequence[str]) -> About:
        """Describe a run of `python -m loadgen` with these arguments, ending now, on this machine."""
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        return cls(command(argv), at, describe_machine())


def command(argv: Sequence[str]) -> str:
    """Return the command line, with an API key in it replaced."""
    shown, hide = [], False
    for word in argv:
        if hide or word.startswith(f"{_KEY}="):
            shown.append("***" if hide else f"{_KEY}=***")
            hide = False
        else:
            shown.append(word)
            hide = word == _KEY
    return shlex.join(["python", "-m", "loadgen", *shown]).replace("'***'", "***")


def load_page(run: RequestRun, slo_s: float, about: About) -> Page:
    """Return the report of a run of single answers."""
    found = run.summary(slo_s)
    made = _begin("Spillway: load", found, about)
    ok = [each for each in run.samples if each.ok]
    latency = [each.latency_s * _MS for each in ok]
    limit = [Mark("limit", slo_s * _MS)]
    made.heading("Latency")
    made.beside(
        [_percentiles({"latency": found["latency_s"], "sent late": found["sent_late_s"]})],
        [
            figure("All answers", plots.cdf({"latency": latency}, "milliseconds", limit)),
            figure("How often", plots.histogram(latency, "milliseconds", limit)),
            figure("By when it was due", _dots(ok, lambda each: each.latency_s, limit)),
        ],
    )
    _over_time(
        made,
        run.samples,
        found,
        run.seconds,
        REFUSED,
        lambda each: each.ok and each.latency_s <= slo_s,
    )
    return made


def chat_page(replies: Sequence[Reply], found: dict[str, Any], goal: Goal, about: About) -> Page:
    """Return the report of a run of streams; `found` is its summary."""
    made = _begin("Spillway: chat load", found, about)
    ok = [each for each in replies if each.ok]
    first = [each.ttft_s * _MS for each in ok if each.ttft_s is not None]
    later = [each.tpot_s * _MS for each in ok if each.tpot_s is not None]
    gaps = [gap * _MS for each in ok for gap in each.gaps_s]
    ttft, tpot = [Mark("limit", goal.ttft_s * _MS)], [Mark("limit", goal.tpot_s * _MS)]
    made.heading("Latency")
    names = {
        "TTFT": "ttft_s",
        "TPOT": "tpot_s",
        "ITL": "itl_s",
        "latency": "latency_s",
        "latency/token": "normalized_s",
    }
    made.beside(
        [_percentiles({name: found[key] for name, key in names.items()})],
        [
            figure(
                "TTFT: when due to the first token",
                plots.cdf({"TTFT": first}, "milliseconds", ttft),
            ),
            figure("TTFT by when it was due", _dots(ok, lambda each: each.ttft_s or 0.0, ttft)),
            figure(
                "TPOT: mean of a later token; ITL: between two pieces",
                plots.cdf({"TPOT": later, "ITL": gaps}, "milliseconds", tpot),
            ),
            figure("TPOT, how often", plots.histogram(later, "milliseconds", tpot)),
        ],
    )
    tokens = _rate([(each.done_s, each.output_tokens) for each in ok], found["seconds"])
    _over_time(
        made, replies, found, found["seconds"], REFUSED_CHAT, lambda each: each.meets(goal), tokens
    )
    return made


def _begin(title: str, found: dict[str, Any], about: About) -> Page:
    made = Page(title)
    made.text(
        f"{about.at}, {machine(about.machine)}; the load generator used {found['loadgen_cpu_s']:.2f} CPU s.",
        muted=True,
    )
    made.command(about.command)
    counts = ["requests", "ok", "refused", "errors"]
    rates = {
        "requests_per_s": "ok/s",
        "items_per_s": "items/s",
        "output_tokens_per_s": "tokens/s",
        "goodput_per_s": "goodput/s",
    }
    there = [key for key in rates if key in found]
    columns = [*counts, *(rates[key] for key in there), "seconds"]
    cells = [
        *(str(found[key]) for key in counts),
        *(f"{found[key]:.2f}" for key in there),
        f"{found['seconds']:.1f}",
    ]
    made.beside([table(columns, [cells])])
    limits = found.get("goal")
    told = (
        f"TTFT within {limits['ttft_s']:g} s and TPOT within {limits['tpot_s'] * _MS:g} ms"
        if limits
        else f"an answer within {found['slo_s']:g} s"
    )
    made.text(f"Goodput: {told}.", muted=True)
    return made


def _percentiles(figures: dict[str, dict[str, float]]) -> str:
    keys = ("p50", "p90", "p99", "max", "mean")
    rows = [
        [name, *(f"{values[key] * _MS:.1f}" for key in keys)]
        for name, values in figures.items()
        if values
    ]
    return table(["milliseconds", *keys], rows)


def _dots(ok: Sequence[T], value: Callable[[T], float], marks: Sequence[Mark]) -> str:
    points = ([each.due_s for each in ok], [max(value(each) * _MS, 0.01) for each in ok])
    return plots.dots({"answers": points}, SINCE, "milliseconds", marks)


def _over_time(
    made: Page, samples: Sequence[T], found: dict[str, Any], seconds: float, refused: frozenset[int],
    good: Callable[[T], bool], tokens: tuple[list[float], list[float]] | None = None,
) -> None:  # fmt: skip
    made.heading("Throughput, goodput, refusals")
    kinds: dict[str, list[tuple[float, float]]] = {
        "ok": [],
        "goodput": [],
        "refused": [],
        "errors": [],
    }
    for each in samples:
        kind = "ok" if each.ok else "refused" if each.status in refused else "errors"
        kinds[kind].append((each.done_s, 1.0))
        if good(each):
            kinds["goodput"].append((each.done_s, 1.0))
    rates = {name: _rate(events, seconds) for name, events in kinds.items() if events}
    drawn = []
    if rates:
        at = next(iter(rates.values()))[0]
        series = {name: rate for name, (_, rate) in rates.items()}
        drawn.append(figure("Answers", plots.lines(at, series, SINCE, "a second")))
    if tokens is not None:
        svg = plots.lines(tokens[0], {"tokens": tokens[1]}, SINCE, "tokens a second")
        drawn.append(figure("Tokens of the answers that ended", svg))
    if found["codes"]:
        counts = {"times": [float(count) for count in found["codes"].values()]}
        svg = plots.bars(list(found["codes"]), counts, "requests")
        drawn.append(figure("Refusals and errors", svg))
    made.beside([table(["answered with", "times"], _codes(found, samples))], drawn)


def _codes(found: dict[str, Any], samples: Sequence[T]) -> list[list[str]]:
    well = Counter("ok" for each in samples if each.ok)
    return [[code, str(count)] for code, count in (well + Counter(found["codes"])).most_common()]


def _rate(events: Sequence[tuple[float, float]], seconds: float) -> tuple[list[float], list[float]]:
    """Return the middles of up to 30 equal bins of at least a second, and the sum per second in each bin."""
    bins = int(min(30, max(1, seconds)))
    edges = np.linspace(0.0, max(seconds, 1e-9), bins + 1)
    sums, _ = np.histogram(
        [at for at, _ in events], edges, weights=[weight for _, weight in events]
    )
    middles = (edges[:-1] + edges[1:]) / 2
    return [float(at) for at in middles], [float(value) for value in sums / (edges[1] - edges[0])]
