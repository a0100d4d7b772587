"""The figures of retrieval beside generation: rows G1, G1S and G3."""

from __future__ import annotations

from bench.figures.figure import NOT_THERE, Figure, Found, rows_where


def _answers(found: Found, column: int) -> str:
    rows = next(each for each in found["tables"] if each["title"].startswith("Table 5.1"))["rows"]
    return f"{' / '.join(row[column] for row in rows)} s"


def _lines(found: Found, source: str) -> list[dict[str, str]]:
    """Return the cells of G1 whose retrievals come from there."""
    rows = [row for row in rows_where(found, {}) if "search" in row]
    return [row for row in rows if row["search"].endswith(source)]


def _alike(source: str, where: str) -> Figure:
    """Return G1's line of the cells whose search takes about as long as a chunk."""

    def ours(found: Found) -> str:
        rows = [row for row in _lines(found, where) if abs(float(row["search / chunk"]) - 1) <= 0.2]
        worst = min(rows, key=_gain, default=None)
        return "no such cell" if worst is None else _told(worst)

    what = f"sequential / pipelined where a search takes as long as a chunk, {source}, worst cell"
    return Figure("G1", what, "≥ 1.3", "≥ 1.6", ours, f"search and chunk alike, {source}")


def _slowest(found: Found) -> str:
    worst = min(_lines(found, "HTTP"), key=_gain, default=None)
    return (
        NOT_THERE
        if worst is None
        else f"{_told(worst)}; predicted {worst['sequential / pipelined: predicted']}"
    )


def _gain(row: dict[str, str]) -> float:
    return float(row["measured [95 %]"].split()[0])


def _told(row: dict[str, str]) -> str:
    return f"{row['measured [95 %]']} ({row['model']}, every {row['every']})"


def _predicted(found: Found) -> str:
    worst = min(_lines(found, ""), key=lambda row: float(row["of the prediction"]))
    return f"{worst['of the prediction']} ({worst['model']}, every {worst['every']})"


def _chosen(found: Found) -> str:
    rows = [row for row in rows_where(found, {}) if "the fastest / chosen" in row]
    return min((row["the fastest / chosen"] for row in rows), default=NOT_THERE)


RETRIEVAL_FIGURES = (
    _alike("searched", "lists"),
    _alike("replayed", "replayed"),
    Figure(
        "G1", "sequential / pipelined over HTTP, whatever a retrieval takes there, worst cell", "≥ 1.0", "≥ 1.0",
        _slowest, "never slower, HTTP",
    ),
    Figure(
        "G1", "sequential / pipelined by the model of two lines, worst cell", "-", "≥ 0.9", _predicted,
        "the model of two lines",
    ),
    Figure(
        "G1", "pipelined or sequential on both cores, chosen by prediction: the fastest / chosen, worst cell", "-",
        "≥ 0.95", _chosen, "the fastest mode is chosen",
    ),
    Figure(
        "G1S", "simulated: seconds of RETRO's answers on three corpora", "± 2 %", "± 2 %", lambda f: _answers(f, 2),
        "seconds of table 5.1", lambda f: f"thesis: {_answers(f, 3)}",
    ),
    Figure(
        "G1S", "simulated: nprobe by rule S3 along an answer, every 64 tokens", "22 … 41", "the same",
        lambda f: " ".join(map(str, f["samples"]["nprobe/64"])), "nprobe by rule S3",
    ),
    Figure(
        "G1S", "simulated: RETRO+ / PipeRAG at equal interval and nprobe, largest of 32", "1 to 2", "1 to 2",
        lambda f: f"{f['samples']['largest ratio']:.2f}", "a pipeline is never slower, and never twice as fast",
    ),
    Figure(
        "G1S", "simulated: searches that are late under noise, worst of 16", "≤ 5 %", "≤ 5 %",
        lambda f: f"{f['samples']['latest']:.1%}", "late searches with the margin",
    ),
    Figure(
        "G1S", "simulated: an answer with rule S3, slower than without retrieval, worst of 16", "≤ 15 %", "≤ 15 %",
        lambda f: f"{f['samples']['slowest']:.1%}", "rule S3 against no retrieval",
        lambda _: "thesis: 10.6 to 13.2 %",
    ),
    Figure(
        "G3", "steps a token of 33 cells of figure 3.8b, simulated: furthest", "≤ 0.07", "≤ 0.07",
        lambda f: f"{f['samples']['furthest']:.3f}", "cells of figure 3.8b",
    ),
    Figure(
        "G3", "steps a token in the engine, from the simulation's: furthest of five loads", "≤ 0.07", "≤ 0.07",
        lambda f: f"{f['samples']['engine furthest']:.3f}", "the engine beside the simulation",
    ),
)  # fmt: skip
