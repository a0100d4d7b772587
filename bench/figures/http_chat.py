"""The figures of chat over HTTP in the summary: the worst cell of each model against a rival."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.figures.figure import Figure, Found

MUSTS = {"L": "≥ 1.0", "M": "≥ 0.9", "S": "≥ 0.9"}
Chosen = Callable[[list[str]], bool]


def _worst(found: Found, table: int, ratio: int, chosen: Chosen) -> list[str]:
    """Return the row with the lowest ratio, which stands in column `ratio`; empty if no row is chosen."""
    rows = [row for row in found["tables"][table]["rows"] if chosen(row)]
    return min(rows, key=lambda row: float(row[ratio].split()[0]), default=[])


def _ours(found: Found, table: int, ratio: int, chosen: Chosen) -> str:
    row = _worst(found, table, ratio, chosen)
    return f"{row[ratio]} ({row[1]}, {row[2]})" if row else "not measured"


def _theirs(found: Found, table: int, ratio: int, chosen: Chosen) -> str:
    row = _worst(found, table, ratio, chosen)
    if not row:
        return "-"
    told = f"{row[5]} tokens/s" if table == 0 else f"{row[ratio - 1].split()[-1]} ms"
    return f"{row[3]}: {told}"


def _figure(
    what: str, model: str, goal: str, met: str, chosen: Chosen, table: int = 0, ratio: int = 6
) -> Figure:
    said = (
        f"chat over HTTP, {what}, ours / rival, worst cell"
        if table == 0
        else (f"chat over HTTP, {what}, rival / ours, worst cell")
    )
    ours = partial(_ours, table=table, ratio=ratio, chosen=chosen)
    theirs = partial(_theirs, table=table, ratio=ratio, chosen=chosen)
    return Figure("H1", said, MUSTS[model], goal, ours, met, theirs)


def _of(model: str) -> tuple[Figure, ...]:
    def one(row: list[str]) -> bool:
        return row[0] == model and row[2].endswith(" x 1")

    def some(row: list[str]) -> bool:
        return row[0] == model and not one(row) and row[1] != "Q8_0"

    def some_int8(row: list[str]) -> bool:
        return row[0] == model and not one(row) and row[1] == "Q8_0"

    def every(row: list[str]) -> bool:
        return row[0] == model

    speed, many = f"tokens/s, {model}", "8 and 32 streams"
    return (
        _figure(f"{model}, one stream: tokens/s", model, "≥ 1.0", f"{speed}, one stream", one),
        _figure(f"{model}, {many}: tokens/s", model, "≥ 1.5", f"{speed}, {many}, bf16 and int4", some),
        _figure(f"{model}, {many}, int8: tokens/s", model, "≥ 2.0", f"{speed}, {many}, int8", some_int8),
        _figure(f"{model}: first token", model, "≥ 1.0", f"first token, {model}", every, 1, 5),
        _figure(f"{model}: a later token", model, "≥ 1.0", f"a later token, {model}", every, 1, 8),
    )  # fmt: skip


def _latest(found: Found) -> str:
    """Return the largest of our 99th percentiles beside its median."""
    rows = [row for row in found["tables"][2]["rows"] if row[3] == "ours"]
    worst: list[str] = max(rows, key=lambda row: float(row[6]), default=[])
    return f"{worst[6]} ({worst[0]}, {worst[1]}, {worst[2]})" if worst else "not measured"


def _token(found: Found) -> str:
    (_, whole), (_, step), (_, between), (_, share) = found["tables"][0]["rows"]
    return f"{share}: step {step}, between {between}, at the client {whole} us"


def _goodput(found: Found) -> list[str]:
    """Return the row of the highest share, which is the one that is judged; empty if nothing was compared."""
    rows: list[list[str]] = found["tables"][0]["rows"]
    return rows[-1] if rows else []


def _within(found: Found) -> str:
    row = _goodput(found)
    return f"{row[3]}, {row[1]} requests/s" if row else "not measured"


def _within_theirs(found: Found) -> str:
    row = _goodput(found)
    return f"llama-server + infinity + pgvector: {row[2]} requests/s" if row else "-"


HTTP_FIGURES: tuple[Figure, ...] = (
    Figure(
        "H2",
        "everything at once: goodput, ours / rivals",
        "≥ 1.0",
        "≥ 1.5",
        _within,
        "goodput",
        _within_theirs,
    ),
    Figure(
        "T1",
        "one token of M, one stream: step and gap, of the client's time",
        "± 10 %",
        "± 10 %",
        _token,
        "adds up, one stream",
    ),
    *(figure for model in MUSTS for figure in _of(model)),
    Figure(
        "H1", "chat over HTTP: p99 gap / median gap, worst cell", "≤ 2", "≤ 2", _latest, "p99 gap"
    ),
)
