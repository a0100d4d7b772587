"""G1S: pipelined retrieval by the thesis' own times: tables 5.1, 5.3, 5.4, rule S3, RETRO+, and faster hardware."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.document import BenchOptions, Body
from bench.simulation.pipelined_answers import PipelinedSystem
from bench.simulation.piperag_published import (
    GENERATION,
    INTERVAL,
    INTERVALS,
    SEARCHES,
    TABLE_5_1,
    TOKENS,
)
from planner.pipelined_retrieval import (
    LatenessMargin,
    SearchTimes,
    TokenTimes,
    choose_interval,
    pipelined_s,
    sequential_s,
)

LISTS = 16_384
NPROBES = tuple(effort for effort, _ in SEARCHES.points)
SEGMENTS = range(0, TOKENS, GENERATION.segment)
# The choices that follow from tables 5.3 and 5.4, by interval, for each segment of 128 tokens.
CHOICES = {
    64: (22, 22, 23, 26, 29, 32, 37, 41),
    32: (10, 10, 11, 12, 14, 15, 18, 20),
    16: (4, 4, 5, 5, 6, 7, 8, 9),
    8: (2, 2, 2, 2, 2, 3, 3, 4),
}
PIPELINED = {8: 9.65, 16: 9.65, 32: 11.0, 64: 19.9, 128: 38.6}  # seconds by nprobe, chunks of 64
SEQUENTIAL = {64: 29.1, 128: 47.8}
SPREADS = (0.0, 0.05, 0.1, 0.3)  # standard deviation of a search by its mean
FASTER = (1, 4, 16)
NEAR, LATE, OVERHEAD, LIMIT = 0.02, 0.05, 0.15, 2.0
BALANCED = 32  # the nprobe whose search takes about as long as a chunk of 64


def run(options: BenchOptions) -> Body:
    """Compute every table (quick: few answers under noise)."""
    body = Body()
    body.notes.append(
        "Simulated: the seconds of tokens and searches are those of tables 5.3 and 5.4 (an A100 and 48 cores); no "
        "accelerator, and no process of ours, stands behind them."
    )
    _published(body)
    _efforts(body)
    _intervals(body)
    _hardware(body)
    _noise(body, options)
    return body


def thesis_s(chunks_s: Sequence[float], search_s: float) -> float:
    """Return the seconds of a pipelined answer as the thesis counts: a search beside every chunk but the first."""
    return pipelined_s(chunks_s, [0.0, *[search_s] * (len(chunks_s) - 1)])


def retro_s(chunks_s: Sequence[float], search_s: float) -> float:
    """Return the seconds of a sequential answer: a search before every chunk but the first."""
    return sequential_s(chunks_s, [search_s] * (len(chunks_s) - 1))


def _judge(body: Body, what: str, *, reached: bool) -> None:
    body.met[what] = "goal" if reached else "missed"


def _published(body: Body) -> None:
    chunks_s, rows, errors = GENERATION.chunks(TOKENS, INTERVAL), [], list[float]()
    for each in TABLE_5_1:
        ours = retro_s(chunks_s, SEARCHES.seconds(each.nprobe))
        errors.append(ours / each.retro_s - 1)
        rows.append([
            each.corpus, str(each.nprobe), f"{ours:.2f}", f"{each.retro_s:.2f}", f"{errors[-1]:+.1%}",
        ])  # fmt: skip
        body.samples[f"table 5.1/{each.corpus}"] = ours
    columns = ["corpus", "nprobe", "RETRO, s", "thesis, s", "difference"]
    body.table(f"Table 5.1: {TOKENS:,} tokens, chunks of {INTERVAL}", columns, rows)
    _judge(body, "seconds of table 5.1", reached=max(map(abs, errors)) <= NEAR)
    alone = sum(chunks_s)
    body.samples["alone"] = alone
    body.notes.append(
        f"Table 5.1: without retrieval the tokens of table 5.4 add up to {alone:.2f} s; the thesis measured 9.35 s. "
        "It does not print RETRO's nprobe: 16, 8 and 4 are the ones that fit."
    )


def _efforts(body: Body) -> None:
    line, rows, equal, rises = SEARCHES.line(), [], True, True
    for interval in sorted(INTERVALS, reverse=True):
        budgets = [GENERATION.between(start, start + interval) for start in SEGMENTS]
        found = [line.largest(budget, LISTS) for budget in budgets]
        equal = equal and tuple(found) == CHOICES[interval]
        rises = rises and found == sorted(found) and found[-1] > found[0]
        rows.append([str(interval), *map(str, found)])
        body.samples[f"nprobe/{interval}"] = found
    columns = ["interval", *(f"from token {start}" for start in SEGMENTS)]
    body.table("Rule S3: the largest nprobe whose search fits a chunk", columns, rows)
    _judge(body, "nprobe by rule S3", reached=equal and rises)
    body.notes.append(
        f"Rule S3 takes a search to last {1e3 * line.base_s:.2f} + {1e3 * line.each_s:.3f} x nprobe ms, the line of "
        "least squares through table 5.3. It is 12 ms above the table at nprobe 1 and 14 ms below it at 32: hence the "
        "margin."
    )


def _intervals(body: Body) -> None:
    rows, near, most, never_slower = [], True, 0.0, True
    for nprobe in NPROBES:
        search_s = SEARCHES.seconds(nprobe)
        cells = []
        for interval in INTERVALS:
            chunks_s = GENERATION.chunks(TOKENS, interval)
            ours, theirs = thesis_s(chunks_s, search_s), retro_s(chunks_s, search_s)
            never_slower = never_slower and ours <= theirs
            most = max(most, theirs / ours)
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}"]
            body.samples[f"interval/{interval}/{nprobe}"] = [ours, theirs]
            if interval == INTERVAL:
                near = near and abs(ours / PIPELINED.get(nprobe, ours) - 1) <= NEAR
                near = near and abs(theirs / SEQUENTIAL.get(nprobe, theirs) - 1) <= NEAR
        rows.append([str(nprobe), *cells])
    columns = ["nprobe"]
    for interval in INTERVALS:
        columns += [f"every {interval}: PipeRAG, s", "RETRO+, s", "ratio"]
    body.table("PipeRAG beside RETRO+ (the same interval without a pipeline)", columns, rows)
    _judge(body, "seconds of PipeRAG and RETRO at an interval of 64", reached=near)
    _judge(body, "a pipeline is never slower, and never twice as fast",
           reached=never_slower and most <= LIMIT)  # fmt: skip
    body.samples["largest ratio"] = most


def _hardware(body: Body) -> None:
    rows, ratios, shown = [], dict[tuple[int, int], float](), (4, BALANCED, 128)
    for inference in FASTER:
        for retrieval in FASTER:
            generation, searches = GENERATION.faster(inference), SEARCHES.faster(retrieval)
            chunks_s, cells = generation.chunks(TOKENS, INTERVAL), []
            for nprobe in shown:
                search_s = searches.seconds(nprobe)
                ratio = retro_s(chunks_s, search_s) / thesis_s(chunks_s, search_s)
                cells.append(f"{ratio:.2f}")
                if nprobe == BALANCED:
                    ratios[inference, retrieval] = ratio
            rows.append([
                f"{inference} x", f"{retrieval} x", f"{sum(chunks_s):.2f}", *cells,
                _choices(generation, searches, INTERVAL),
                str(choose_interval(INTERVALS, generation, TOKENS, searches.seconds(1))),
            ])  # fmt: skip
    columns = ["inference", "retrieval", "no retrieval, s"]
    columns += [*(f"RETRO / PipeRAG, nprobe {each}" for each in shown)]
    columns += [f"nprobe by S3, every {INTERVAL}", "interval chosen"]
    body.table("Faster hardware (figure 5.7)", columns, rows)
    body.samples["hardware"] = {f"{i}/{r}": ratio for (i, r), ratio in ratios.items()}
    less = max(ratios[16, 1], ratios[1, 16]) < ratios[1, 1]
    _judge(body, "a side that is 16 x as fast gains less from a pipeline", reached=less)
    body.notes.append(
        f"Faster hardware: chunks of {INTERVAL} tokens. The interval chosen is the smallest one whose shortest chunk "
        "takes as long as a search of one list; where no interval does, it is the largest."
    )


def _choices(generation: TokenTimes, searches: SearchTimes, interval: int) -> str:
    line = searches.line()
    ends = (generation.between(start, start + interval) for start in (0, TOKENS - interval))
    return " to ".join(str(line.largest(end, LISTS)) for end in ends)


def _noise(body: Body, options: BenchOptions) -> None:
    answers, rows, worst, most = options.rounds(200, 50), [], 0.0, 0.0
    for interval in INTERVALS:
        system = PipelinedSystem(GENERATION, SEARCHES, TOKENS, interval, LISTS)
        for spread in SPREADS:
            margin = LatenessMargin()
            plain = LatenessMargin(step=0.0, factor=1.0)
            rng = random.Random(f"{options.seed} {interval} {spread}")
            found = system.run(answers, spread, rng, margin)
            without = system.run(answers, spread, rng, plain)
            worst, most = max(worst, found.late_share), max(most, found.overhead)
            mean = [sum(each.efforts) / len(each.efforts) for each in (found, without)]
            rows.append([
                str(interval), f"{spread:.0%}", f"{found.late_share:.1%}", f"{found.overhead:.1%}",
                f"{mean[0]:.1f}", f"{margin.factor:.2f}", f"{without.late_share:.1%}",
                f"{without.overhead:.1%}", f"{mean[1]:.1f}",
            ])  # fmt: skip
            body.samples[f"noise/{interval}/{spread:g}"] = {
                "late": found.late_share, "overhead": found.overhead, "mean nprobe": mean[0],
                "without a margin": [without.late_share, without.overhead, mean[1]],
            }  # fmt: skip
    columns = ["interval", "spread of a search", "late", "slower than no retrieval", "mean nprobe"]
    columns += ["margin at the end", "no margin: late", "slower", "mean nprobe"]
    body.table("Rule S3 with a margin learned from late searches", columns, rows)
    _judge(body, "late searches with the margin", reached=worst <= LATE)
    _judge(body, "rule S3 against no retrieval", reached=most <= OVERHEAD)
    body.samples |= {"latest": worst, "slowest": most}
    body.notes.append(
        f"Margin: {answers} answers one after the other; searches and chunks are drawn from gamma distributions (a "
        "chunk's spread is a fifth of a search's). The first search of an answer is waited for, neither late nor in "
        "time. The thesis' 10.6 to 13.2 % also hold the attention to what was retrieved, of which it prints no time."
    )
