"""The figures of retrieval beside generation: rows G1S and G3."""

from __future__ import annotations

from bench.figures.figure import Figure, Found


def _answers(found: Found, column: int) -> str:
    rows = next(each for each in found["tables"] if each["title"].startswith("Table 5.1"))["rows"]
    return f"{' / '.join(row[column] for row in rows)} s"


RETRIEVAL_FIGURES = (
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
