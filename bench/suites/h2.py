"""H2: the product's own case, one machine under chat, embeddings, search and ingest at once, against three servers.

Goodput is the load at which 99 % of the requests of every kind still meet their objective. A sum over kinds would let
a product that starves chat win by the many cheap searches; one number for the worst kind is what a buyer plans by.
Between two measured load factors the share is interpolated, so that the ladder's steps do not decide.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from bench.document import BenchOptions, Body, Rival
from bench.mesh.mesh_stack import mesh_stack
from bench.rivals import completion_servers, llama_server, pgvector
from bench.rivals.assembled_stack import (
    CHANGES,
    INFINITY,
    INFINITY_VERSION,
    Division,
    assembled_stack,
    divisions,
    varied,
)
from bench.rounds import FEWEST
from bench.suites.engine_pairs import told
from bench.workloads.mixed_load import (
    CHAT,
    KINDS,
    OBJECTIVES,
    SHAPE,
    Hold,
    Served,
    Stack,
    TextCorpus,
    corpus,
)
from bench.workloads.mixed_runs import (
    Climb,
    Ladder,
    LoadStep,
    MixedRuns,
    MixKept,
    Start,
    capacity,
    ended_rounds,
    joined,
    shares_of,
    steps,
    worst,
)
from common.devices import detect
from loadgen import stats

LEVEL = 0.99  # of every kind: the share that must meet its objective
FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)  # of SHAPE's rates
OVER = 0.9  # a share below this ends the climb: what comes next is overload
HOLD_S, WARM_S = (
    120.0,
    10.0,
)  # a factor is held so long; requests due in the first seconds do not count
ROUNDS = 5  # climbs of both sides in turns, each with other arrivals
SWEEP_S = 40.0  # a hold while divisions of the cores are tried
MODEL, KIND = "M", "bf16"
GOAL, MUST = 1.5, 1.0
# -- what is above and in bench/workloads/mixed_load.py was fixed before the first run

LEVELS = (0.9, 0.95, LEVEL)
OURS, THEIRS = "ours", "llama-server + infinity + pgvector"
DEVICE_TOKENS, SPARE = 32_768, 32  # of KV cache on our side
PIECES = 20_000  # at most: all that the standard library has, as in V1
QUICK_FACTORS, QUICK_S, QUICK_WARM_S, QUICK_ROWS, QUICK_PIECES = (0.5, 1.0), 4.0, 1.0, 400, 1000


def run(options: BenchOptions) -> Body:
    """Try the divisions of the cores, then climb with both sides in turns (quick: one division, two short holds)."""
    shape = dataclasses.replace(SHAPE, rows=options.pick(SHAPE.rows, QUICK_ROWS))
    limit = options.pick(PIECES, QUICK_PIECES)
    pieces = corpus(shape.rows, limit, options.setup_dir / "data")
    runs = MixedRuns(options, pieces, shape)
    asyncio.run(_all(runs, pieces, options))
    return describe(runs.kept, options, runs.left)


def ladder(options: BenchOptions, hold_s: float) -> Ladder:
    """Return the load factors, each held for so long."""
    if options.quick:
        return Ladder(QUICK_FACTORS, QUICK_S, QUICK_WARM_S, OVER)
    return Ladder(FACTORS, hold_s, WARM_S, OVER)


async def _all(runs: MixedRuns, pieces: TextCorpus, options: BenchOptions) -> None:
    sweep = ladder(options, SWEEP_S)
    cores = detect().usable_cores
    tried = [each for each in divisions(cores) if options.only in each.name]
    if not tried:
        known = ", ".join(each.name for each in divisions(cores))
        raise ValueError(f"no division holds {options.only!r}; expected a part of one of {known}")
    for division in tried[:1] if options.quick else tried:
        await runs.climb(*_try(division, pieces, options), sweep)
    if not options.quick and not runs.left:
        for number, change in enumerate(CHANGES, len(tried)):
            chosen = best(runs.kept.tried[:number], sweep.warm_s)
            await runs.climb(*_try(varied(chosen, change), pieces, options), sweep)
    chosen = best(runs.kept.tried, sweep.warm_s) if runs.kept.tried else tried[0]
    starts: dict[str, Start] = {
        OURS: partial(_ours, pieces, options),
        THEIRS: partial(_theirs, pieces, chosen, options),
    }
    if not runs.left:
        await runs.compare(starts, ladder(options, HOLD_S), options.rounds(ROUNDS, 1))


def _try(
    division: Division, pieces: TextCorpus, options: BenchOptions
) -> tuple[str, dict[str, str | int], Start]:
    start: Start = partial(_theirs, pieces, division, options)
    return division.name, dataclasses.asdict(division), start


@asynccontextmanager
async def _ours(pieces: TextCorpus, options: BenchOptions) -> AsyncIterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="spillway-h2-") as folder:
        async with mesh_stack(_weights(options), pieces, Path(folder)) as stack:
            yield stack


@asynccontextmanager
async def _theirs(
    pieces: TextCorpus, division: Division, options: BenchOptions
) -> AsyncIterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="spillway-h2-") as folder:
        found = _weights(options)
        async with assembled_stack(found, pieces, division, Path(folder), options) as stack:
            yield stack


def _weights(options: BenchOptions) -> completion_servers.Weights:
    context = SHAPE.prompt_tokens[1] + SHAPE.new_tokens[1] + SPARE
    return completion_servers.weights(MODEL, context, DEVICE_TOKENS, 1, options)


def best(tried: Sequence[Climb], warm_s: float) -> Division:
    """Return the division with the largest load at the level; of equal ones the one tried first."""
    found = max(tried, key=lambda each: climbed(each, warm_s))
    return msgspec.convert(found.setting, Division)


def climbed(tried: Climb, warm_s: float, level: float = LEVEL) -> float:
    """Return the load factor that a tried setting carried; below 0 if it did not start."""
    if tried.why:
        return -1.0
    held = {float(name): worst(hold.counts(warm_s)) for name, hold in tried.holds.items()}
    return capacity(held, level)


# -- what is said --------------------------------------------------------------------------------------


def describe(kept: MixKept, options: BenchOptions, left: int = 0) -> Body:
    """Turn what was measured into tables, verdicts and notes."""
    body = Body(samples=msgspec.to_builtins(kept), left=left)
    rungs = ladder(options, HOLD_S)
    warm_s, ended = rungs.warm_s, ended_rounds(kept.rounds, rungs)
    found = {side: steps(ended, side, warm_s) for side in (OURS, THEIRS)}
    both = all(found.values())
    columns = ["of every kind within its objective", "ours, requests/s", "rivals, requests/s"]
    body.table(
        "Goodput: requests a second of the whole mix",
        [*columns, "ratio [95 %]", "reached", "rounds"],
        [_goodput(level, found[OURS], found[THEIRS], body) for level in LEVELS] if both else [],
    )
    columns = ["load factor", "side", *(f"{kind} within (%)" for kind in KINDS)]
    columns += ["TTFT p50 / p99 (ms)", "a token p50 / p99 (ms)"]
    columns += [f"{kind} p50 / p99 (ms)" for kind in KINDS if kind != CHAT]
    body.table("Every load factor, all rounds", columns, _every(kept, warm_s))
    columns = ["division of the cores", "requests/s at 99 %", "requests/s at 90 %", ""]
    body.table("Settings of the rivals, tried alone", columns, _settings(kept, warm_s))
    body.notes += _notes(kept, options, found)
    if unended := len({each.round for each in kept.rounds} - {each.round for each in ended}):
        body.notes.append(
            f"Rounds left before both sides had too much: {unended}. Their steps stand in the table of load factors "
            "alone."
        )
    tried = [each.setting for each in kept.tried]
    chosen = best(kept.tried, warm_s) if kept.tried else None
    said = {} if chosen is None else dataclasses.asdict(chosen)
    versions = {
        llama_server.NAME: llama_server.VERSION, INFINITY: INFINITY_VERSION, pgvector.NAME: pgvector.VERSION,
    }  # fmt: skip
    for name, version in versions.items():
        body.rivals.append(Rival(name, version, tried, said, bool(found[THEIRS])))
    return body


def _goodput(
    level: float,
    ours: Sequence[Mapping[float, LoadStep]],
    theirs: Sequence[Mapping[float, LoadStep]],
    body: Body,
) -> list[str]:
    rate = sum(SHAPE.per_s.values())
    mine, other = (capacity(shares_of(some), level) for some in (ours, theirs))
    ratio = ratio_of(ours, theirs, level)
    few = len(ours) < FEWEST
    word = "undecided" if few else stats.verdict(ratio, GOAL, MUST)
    if level == LEVEL:
        body.met["goodput"] = word
    speeds = [f"{rate * factor:.1f}" for factor in (mine, other)]
    return [f"{level:.0%}", *speeds, told(ratio), word, str(len(ours))]


def ratio_of(
    ours: Sequence[Mapping[float, LoadStep]],
    theirs: Sequence[Mapping[float, LoadStep]],
    level: float,
) -> dict[str, float]:
    """Return our load over theirs at a level, with the bootstrap 95 % interval over rounds drawn together."""
    draw, count = random.Random(1), min(len(ours), len(theirs))

    def one(places: Sequence[int]) -> float:
        mine, other = (
            capacity(shares_of([side[at] for at in places]), level) for side in (ours, theirs)
        )
        return mine / max(other, 1e-9)

    draws = [one(draw.choices(range(count), k=count)) for _ in range(stats.RESAMPLES)]
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"value": one(range(count)), "low": float(low), "high": float(high), "n": count}


def _every(kept: MixKept, warm_s: float) -> list[list[str]]:
    rows = []
    for factor in sorted({each.factor for each in kept.rounds}):
        for side in (OURS, THEIRS):
            holds = [r.sides[side] for r in kept.rounds if r.factor == factor and side in r.sides]
            if holds:
                rows.append([f"{factor:g}", side, *_cells(holds, warm_s)])
    return rows


def _cells(holds: Sequence[Hold], warm_s: float) -> list[str]:
    counts = joined([hold.counts(warm_s) for hold in holds])
    shares = [
        f"{100 * each.met / each.asked:.1f}" if each.asked else "-" for each in counts.values()
    ]
    done: dict[str, list[Served]] = {
        kind: [s for hold in holds for s in hold.kinds[kind] if s.due_s >= warm_s and not s.code]
        for kind in KINDS
    }
    chats = done[CHAT]
    times = [[s.first_s for s in chats], [s.token_s for s in chats]]
    times += [[s.latency_s for s in done[kind]] for kind in KINDS if kind != CHAT]
    return [*shares, *(_spread(some) for some in times)]


def _spread(seconds: Sequence[float]) -> str:
    found = stats.percentiles(seconds)
    return f"{1e3 * found['p50']:.0f} / {1e3 * found['p99']:.0f}" if found else "-"


def _settings(kept: MixKept, warm_s: float) -> list[list[str]]:
    rate = sum(SHAPE.per_s.values())
    chosen = best(kept.tried, warm_s).name if kept.tried else ""
    return [
        [
            each.name,
            *(f"{rate * climbed(each, warm_s, level):.1f}" if not each.why else "-" for level in (LEVEL, 0.9)),
            "best" if each.name == chosen else each.why.rpartition("\n")[2][:80],
        ]
        for each in kept.tried
    ]  # fmt: skip


def _notes(
    kept: MixKept, options: BenchOptions, found: Mapping[str, Sequence[Mapping[float, LoadStep]]]
) -> list[str]:
    limits = (
        f"Objectives, counted from when a request was due: first token {OBJECTIVES.first_s:g} s, later tokens "
        f"{1e3 * OBJECTIVES.token_s:g} ms each, search {1e3 * OBJECTIVES.search_s:g} ms, embeddings "
        f"{OBJECTIVES.embed_s:g} s, ingest {OBJECTIVES.ingest_s:g} s. A refused or failed request misses."
    )
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in SHAPE.per_s.items())
    shape = (
        f"Load factor 1 is so many requests a second: {rates}; Poisson arrivals, ingest steady. A chat has a prompt of "
        f"{SHAPE.prompt_tokens[0]} to {SHAPE.prompt_tokens[1]} tokens and {SHAPE.new_tokens[0]} to "
        f"{SHAPE.new_tokens[1]} new ones ({MODEL}, {KIND}); embeddings have {SHAPE.texts} texts of at most 160 "
        f"characters, an ingest {SHAPE.documents}; a search embeds one and finds {SHAPE.k} of "
        f"{options.pick(SHAPE.rows, QUICK_ROWS):,} with their texts."
    )
    sides = (
        "Both sides are up; all processes of one are stopped (SIGSTOP) while the other gets the same requests at the "
        "same moments from one client over HTTP (pgvector: asyncpg, prepared statements, a Unix socket). A side "
        f"climbs until less than {OVER:.0%} of a kind meet their objective. Ours has its defaults; ingest is sent with "
        "`Spillway-Priority: low`. pgvector's table was filled with the vectors of our encoder."
    )
    notes = [limits, shape, sides]
    if kept.recall:
        said = ", ".join(f"{name} {value:.3f}" for name, value in kept.recall.items())
        notes.append(
            f"Recall@{SHAPE.k} of what is served, against exact search by our encoder: {said}."
        )
    moved = sum(not step.still for each in found[OURS] for step in each.values())
    if moved:
        notes.append(f"The machine's speed moved during {moved} steps, which do not count.")
    failed = _failures(kept)
    if failed:
        notes.append(f"Requests that failed or were refused: {failed}.")
    return notes + [f"{name} was not measured: {why}" for name, why in kept.absent.items()]


def _failures(kept: MixKept) -> str:
    """Return how often each code ended a request of each side."""
    found: dict[str, int] = {}
    for each in kept.rounds:
        for side, hold in each.sides.items():
            for kind, some in hold.kinds.items():
                for served in some:
                    if served.code:
                        key = f"{side}, {kind}: {served.code}"
                        found[key] = found.get(key, 0) + 1
    return "; ".join(f"{key} ({count})" for key, count in sorted(found.items()))
