"""The plots of a report, drawn by matplotlib as inline SVG; musts are dashed amber lines, goals dashed green ones."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

COLOURS = ("#2563a8", "#c2571a", "#2f855a", "#8a4fa8", "#b0335c", "#6b7280", "#0f766e", "#a16207")
MUST, GOAL = "#b7791f", "#2f855a"
WIDE, HIGH = 6.2, 3.3
_FAR = 3
_WIDTHS = (
    2.6,
    1.4,
    1.4,
    1.4,
    1.4,
    1.4,
    1.4,
    1.4,
)  # the first line shows through the second
_POINTS = 400  # points of a curve: more are not visible


class Mark(NamedTuple):
    """A level drawn as a line: "must" or "goal" (in their colours), or any other word."""

    word: str
    at: float


class Ratio(NamedTuple):
    """One measured value with its 95 % interval and the levels to compare it with."""

    name: str
    value: float
    low: float
    high: float
    must: float | None = None
    goal: float | None = None


def cdf(
    series: Mapping[str, Sequence[float]],
    unit: str,
    marks: Sequence[Mark] = (),
    *,
    log: bool = False,
) -> str:
    """Draw the share of values at or below x for each series; empty series are left out."""
    axes = _axes()
    for colour, (name, values) in zip(COLOURS, series.items(), strict=False):
        if len(values):
            at = np.sort(np.asarray(values, float))
            share = np.arange(1, at.size + 1) / at.size
            keep = np.unique(np.linspace(0, at.size - 1, _POINTS).astype(int))
            axes.step(at[keep], share[keep], where="post", color=colour, label=name, lw=1.5)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1.0], ["0", "25 %", "50 %", "75 %", "90 %", "100 %"])
    axes.set_xlabel(unit)
    axes.set_ylabel("of all")
    if log:
        _log(axes, "x")
    else:
        axes.set_xlim(left=0)
    _mark(axes, marks)
    return _svg(axes, legend="lower right")


def histogram(values: Sequence[float], unit: str, marks: Sequence[Mark] = ()) -> str:
    """Draw the counts of values in 40 bins up to their 99.5th percentile; the last bin has the rest."""
    axes = _axes()
    if len(values):
        most = float(np.percentile(values, 99.5))
        axes.hist(
            np.clip(values, None, most), bins=40, range=(0, most), color=COLOURS[0], alpha=0.85
        )
    axes.set_xlabel(unit)
    axes.set_ylabel("requests")
    axes.set_xlim(left=0)
    _mark(axes, marks)
    return _svg(axes)


def lines(
    x: Sequence[float], series: Mapping[str, Sequence[float]], xlabel: str, ylabel: str
) -> str:
    """Draw series over a common x; nan leaves a gap."""
    axes = _axes()
    for width, colour, (name, values) in zip(_WIDTHS, COLOURS, series.items(), strict=False):
        axes.plot(x, values, color=colour, label=name, lw=width)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    return _svg(axes, legend="best")


def dots(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    marks: Sequence[Mark] = (),
    *,
    joined: bool = False,
) -> str:
    """Draw points (x, y) of each series on a logarithmic y, joined by lines or not."""
    axes = _axes()
    for colour, (name, (x, y)) in zip(COLOURS, series.items(), strict=False):
        if len(x):
            if joined:
                axes.plot(x, y, "o-", ms=4, color=colour, label=name, lw=1.4)
            else:
                axes.scatter(x, y, s=7, color=colour, label=name, alpha=0.6, linewidths=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if any(len(x) for x, _ in series.values()):
        _log(axes, "y")
    for mark in marks:
        axes.axhline(mark.at, color=_colour(mark), ls="--", lw=1.2)
        axes.annotate(mark.word, (1, mark.at), xycoords=("axes fraction", "data"), ha="right",
                      va="bottom", fontsize=8, color=_colour(mark))  # fmt: skip
    return _svg(axes, legend="best" if len(series) > 1 else "")


def strips(
    groups: Mapping[str, Sequence[float]], unit: str, limits: Mapping[str, Sequence[float]] = {}
) -> str:  # fmt: skip
    """Draw every value of each group as a dot on the group's row, and its limits as ticks."""
    axes = _axes(rows=len(groups))
    for row, (name, values) in enumerate(groups.items()):
        jitter = 0.22 * np.sin(np.arange(len(values)) * 2.4)
        axes.scatter(values, row + jitter, s=14, color=COLOURS[0], alpha=0.6, linewidths=0)
        found = sorted(set(limits.get(name, ())))
        axes.vlines(found, row - 0.38, row + 0.38, color=MUST, lw=1, alpha=0.7)
    _rows(axes, list(groups), unit)
    if limits:
        axes.plot([], [], color=MUST, lw=1.2, label="allowed")
        return _svg(axes, legend="outside")
    return _svg(axes)


def ratios(found: Sequence[Ratio], unit: str, *, log: bool = False) -> str:
    """Draw a row for each value with its interval, and its levels as ticks."""
    axes = _axes(rows=len(found))
    for row, each in enumerate(found):
        for level, colour in ((each.must, MUST), (each.goal, GOAL)):
            if level is not None:
                axes.vlines([level], row - 0.38, row + 0.38, color=colour, lw=2.2)
        axes.plot([each.low, each.high], [row, row], color=COLOURS[0], lw=2)
        axes.plot([each.value], [row], "o", color=COLOURS[0], ms=5)
    _rows(axes, [each.name for each in found], unit, log=log)
    if any(each.must is not None for each in found):
        axes.plot([], [], color=MUST, lw=2.2, label="must")
    if any(each.goal is not None for each in found):
        axes.plot([], [], color=GOAL, lw=2.2, label="goal")
    return _svg(axes, legend="outside")


def bars(
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    unit: str,
    marks: Sequence[Mark] = (),
) -> str:
    """Draw grouped horizontal bars, one group for each name."""
    axes = _axes(rows=max(2, len(names) * max(1, len(series)) // 2 + 1))
    high = 0.8 / max(1, len(series))
    for number, (colour, (name, values)) in enumerate(zip(COLOURS, series.items(), strict=False)):
        at = np.arange(len(names)) + (number - (len(series) - 1) / 2) * high
        axes.barh(at, values, height=high * 0.92, color=colour, label=name)
    _rows(axes, list(names), unit)
    if all(float(value).is_integer() for values in series.values() for value in values):
        axes.xaxis.get_major_locator().set_params(integer=True)
    _mark(axes, marks)
    return _svg(axes, legend="outside" if len(series) > 1 else "")


def _axes(rows: int = 0) -> Any:
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and only reports need it

    high = HIGH if not rows else 1.1 + 0.36 * rows
    axes = Figure(figsize=(WIDE, high), layout="constrained").add_subplot()
    axes.grid(visible=True, color="#e6eaf0", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    return axes


def _rows(axes: Any, names: list[str], unit: str, *, log: bool = False) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(unit)
    axes.grid(visible=False, axis="y")
    if log:
        _log(axes, "x")
    else:
        axes.set_xlim(left=0)


def _log(axes: Any, which: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    if high / max(low, 1e-12) < 1e4:
        subs = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _mark(axes: Any, marks: Sequence[Mark]) -> None:
    """Draw levels on x; a level far beyond the values is only written at the right edge."""
    for mark in marks:
        left, right = axes.get_xlim()
        word = {"color": _colour(mark), "fontsize": 8, "va": "bottom"}
        if mark.at > _FAR * right:
            axes.annotate(
                f"{mark.word}: {mark.at:g} →", (1, 1), xycoords="axes fraction", ha="right", **word
            )
            continue
        axes.axvline(mark.at, color=_colour(mark), ls="--", lw=1.2)
        axes.annotate(
            mark.word, (mark.at, 1), xycoords=("data", "axes fraction"), ha="center", **word
        )
        axes.set_xlim(left, max(right, mark.at * 1.05))


def _colour(mark: Mark) -> str:
    return {"must": MUST, "goal": GOAL}.get(mark.word.split()[0], "#6b7280")


def _svg(axes: Any, legend: str = "") -> str:
    import matplotlib as mpl  # noqa: PLC0415

    named = len(axes.get_legend_handles_labels()[0])
    if legend == "outside" and named:
        axes.figure.legend(loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    elif legend and named:
        axes.legend(fontsize=8, frameon=False, loc=legend)
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "spillway"}
    out = io.StringIO()
    with mpl.rc_context(settings):
        axes.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
