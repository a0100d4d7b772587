"""P5: which pages a tier drops, by policy: one tier under one rule, two tiers under conversations, the cost of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import msgspec
import numpy as np

from bench.document import BenchOptions, Body
from bench.partial import PartialResults
from bench.simulation import kv_loads, kv_rule, kv_traces
from bench.simulation.kv_rule import price
from bench.simulation.kv_simulation import TierSetting, TierSimulation
from bench.simulation.kv_traces import TraceTurn
from common.pages.identity import PAGE
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import NAMES, make_policy

TRACE = Path("traces") / "mooncake_synthetic_trace.jsonl"
MOONCAKE = "Mooncake's trace"
SIZES = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
JUDGED = (1000, 5000)  # where the way counts; between them, S3-FIFO
GOAL = 0.4  # of the way from LRU to who knows how often
POLICIES = ("lru", "s3fifo", "spillway")
REQUESTS = 3000
TIERS = ((3.0, 150_000), (4.0, 150_000), (4.0, 60_000))  # turns a second, tokens on the host
SESSIONS = 10_000
SLIP = 0.001  # of all pages: a turn or two of a load
MOST_US = 200.0


class LoadRates(msgspec.Struct):
    """Hit rates on one load, by size and policy."""

    sizes: dict[int, dict[str, float]] = {}


class RatesKept(msgspec.Struct):
    """What was simulated so far, by load."""

    loads: dict[str, LoadRates] = {}


def run(options: BenchOptions) -> Body:
    """Run every policy on loads it has not seen and on Mooncake's trace (quick: short ones), in tiers, by the clock."""
    partial = PartialResults(options, RatesKept)
    path = options.setup_dir / TRACE
    loads = dict(kv_loads.unseen(options.pick(REQUESTS, 300), options.seed))
    if path.is_file():
        loads[MOONCAKE] = kv_traces.read(path)[: options.pick(1 << 30, 300)]
    for kind, requests in loads.items():
        if options.only in kind:
            _simulate(kind, requests, partial, options)
    body = describe(partial.kept, partial.left)
    if not path.is_file():
        body.notes.append(
            f"{MOONCAKE}: not measured; put the published `{TRACE.name}` into `.bench-env/{TRACE.parent}/`."
        )
    _tiers(body, options)
    _decisions(body, options)
    return body


def _simulate(
    kind: str,
    requests: Sequence[TraceTurn],
    partial: PartialResults[RatesKept],
    options: BenchOptions,
) -> None:
    names = (*POLICIES, "pensieve") if kind == MOONCAKE else POLICIES
    kept = partial.kept.loads.setdefault(kind, LoadRates()).sizes
    for size in SIZES[:2] if options.quick else SIZES:
        if size in kept:
            continue
        if not partial.begins():
            return
        kept[size] = {name: kv_rule.hit_rate(name, requests, size) for name in names} | {
            "informed": kv_rule.informed(requests, size),
            "clairvoyant": kv_rule.clairvoyant(requests, size),
        }
        partial.save()


def describe(kept: RatesKept, left: int = 0) -> Body:
    """Turn hit rates into tables and verdicts; Mooncake's trace, which parameters were chosen with, is not judged."""
    body = Body(samples={"loads": msgspec.to_builtins(kept.loads, str_keys=True)}, left=left)
    shown = ("lru", "s3fifo", "pensieve", "spillway", "informed", "clairvoyant")
    heads = ["pages", "lru", "s3fifo", "pensieve", "spillway", "knows how often", "clairvoyant"]
    for kind, load in kept.loads.items():
        there = [name in next(iter(load.sizes.values()), {}) for name in shown]
        columns = [heads[0], *(head for head, yes in zip(heads[1:], there, strict=True) if yes)]
        rows = [
            [f"{size:,}", *(f"{100 * at[name]:.1f}%" for name in shown if name in at), _said(at)]
            for size, at in load.sizes.items()
        ]
        body.table(f"{kind}: share of pages held", [*columns, "spillway's way from LRU"], rows)
        if kind != MOONCAKE:
            _judge(body, kind, load)
    body.notes.append(
        "Way: from LRU (0 %) to the policy that drops the page that will be used the fewest times, which knows how "
        "often, not when (100 %); - where there are less than "
        f"{SLIP:.1%} of all pages between them. Requests are looked up, touched and evicted one page after the other."
    )
    body.notes.append(
        f"{MOONCAKE} is the load that parameters were chosen with, and is not judged. The others are of kinds and "
        f"seeds (from {kv_loads.FRESH}) that they were not; `skew` and `conversations` are new seeds of the kinds "
        "that parameters were chosen with."
    )
    return body


def way(at: dict[str, float]) -> float | None:
    """Return how far a policy gets from LRU (0) to who knows how often (1); None if there is no way to go."""
    room = at["informed"] - at["lru"]
    return (at["spillway"] - at["lru"]) / room if room > SLIP else None


def _said(at: dict[str, float]) -> str:
    found = way(at)
    return "-" if found is None else f"{found:.0%}"


def _judge(body: Body, kind: str, load: LoadRates) -> None:
    for size in JUDGED:
        if (at := load.sizes.get(size)) is not None and (found := way(at)) is not None:
            body.met[f"{kind}, {size:,}: way from LRU"] = (
                "goal" if found >= GOAL else "must" if at["spillway"] >= at["lru"] else "missed"
            )
    below = max((at["lru"] - at["spillway"] for at in load.sizes.values()), default=0.0)
    body.met[f"{kind}: never below LRU"] = "missed" if below > 0 else "goal"
    beside = [at for size, at in load.sizes.items() if JUDGED[0] <= size <= JUDGED[1]]
    under = any(at["spillway"] < at["s3fifo"] for at in beside)
    body.met[f"{kind}: never below S3-FIFO at 1k to 5k"] = "must" if under else "goal"


def _tiers(body: Body, options: BenchOptions) -> None:
    rows = []
    seeds = options.rounds(2, 1)
    kinds = [(name, name, True) for name in NAMES]
    kinds.append(("lru-conversation, as few as it takes", "lru-conversation", False))
    for rate, host in TIERS[2:] if options.quick else TIERS:
        for kind, name, one_by_one in kinds:
            count = options.pick(1100, 150)
            setting = TierSetting(rate, host // PAGE, conversations=count, one_by_one=one_by_one)
            found = [TierSimulation(name, setting, options.seed + n).run() for n in range(seeds)]
            cells = (
                f"{100 * fmean(each.hit_rate for each in found):.1f}%",
                f"{fmean(each.recomputed_tokens for each in found):,.0f}",
                f"{fmean(each.recompute_s for each in found):,.1f}",
            )
            rows.append([f"{rate:g} turns/s", f"{host:,}", kind, *cells])
            body.samples[f"tiers/{rate:g}/{host}/{kind}"] = [
                [each.hit_rate, each.recomputed_tokens, each.recompute_s, each.waits]
                for each in found
            ]
    columns = ["load", "host tokens", "policy", "held", "tokens recomputed", "seconds recomputed"]
    body.table("Device and host under conversations, simulated", columns, rows)
    body.notes.append(
        "Two tiers: a virtual clock; 52,428 tokens on the device, 25 % of it kept free; conversations like "
        "ShareGPT's, pauses of 60 s in the mean; seconds as of OPT-13B on an A100, attention at 4,096 tokens a quarter "
        "of the rest. A full host drops 16 victims; lru-conversation 16 conversations, or as few as hold 16 pages."
    )


def _decisions(body: Body, options: BenchOptions) -> None:
    sessions = options.pick(SESSIONS, 500)
    rows, worst = [], 0.0
    for name in NAMES:
        cells = []
        for count in (1, 16):
            spent = _timed(name, sessions, count, options.rounds(300, 20))
            body.samples[f"decision/{name}/{count}"] = spent
            cells.append(f"{median(spent):.1f} / {float(np.percentile(spent, 99)):.1f}")
            worst = max(worst, median(spent))
        rows.append([name, *cells])
    columns = ["policy", "one page: us p50 / p99", "16 pages at once: us p50 / p99, each"]
    body.table(
        f"A decision among {sessions:,} sessions of 18 pages, 8 of them shared", columns, rows
    )
    body.met["a decision"] = "goal" if worst <= MOST_US else "missed"


def _timed(name: str, sessions: int, count: int, rounds: int) -> list[float]:
    """Return microseconds a victim, in decisions for `count` victims each."""
    history = History()
    policy = make_policy(name, history, price)
    for session in range(sessions):
        shared = [f"prompt/{session % 20}/{place}".encode() for place in range(8)]
        pages = shared + [f"{session}/{place}".encode() for place in range(10)]
        history.begin(pages[:12], session * 0.1)
        history.end(pages, session * 0.1 + 1)
        for page in pages:
            policy.add(page)
    spent = []
    for number in range(rounds):
        began = time.perf_counter()
        found = policy.victims(count, sessions * 0.1 + number)
        spent.append(1e6 * (time.perf_counter() - began) / len(found))
        for page in found:
            policy.discard(page)
    return spent
