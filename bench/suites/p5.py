"""P5: which pages a tier drops, by policy: one tier under one rule, two tiers under conversations, the cost of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np

from bench.document import BenchOptions, Body
from bench.simulation import kv_rule, kv_traces
from bench.simulation.kv_rule import price
from bench.simulation.kv_simulation import Setting, Simulation
from bench.simulation.kv_traces import Request
from common.pages.identity import PAGE
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import NAMES, make_policy

TRACE = Path("traces") / "mooncake_synthetic_trace.jsonl"
SIZES = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
SKEWS = (0.6, 0.9, 1.2, math.inf)
TIERS = ((3.0, 150_000), (4.0, 150_000), (4.0, 60_000))  # turns a second, tokens on the host
SESSIONS = 10_000
FRESH = 1000  # seeds that the policy's parameters were not chosen with begin here
SLIP = 0.001  # of all pages: a turn or two of a load
MOST_US = 200.0


def run(options: BenchOptions) -> Body:
    """Run every policy on Mooncake's trace and on generated loads (quick: short ones), in tiers and by the clock."""
    body = Body()
    path = options.setup_dir / TRACE
    if path.is_file():
        requests = kv_traces.read(path)[: options.pick(1 << 30, 400)]
        _mooncake(body, requests, options)
    else:
        body.met["Mooncake's trace"] = "not measured"
        body.notes.append(
            f"Mooncake's trace: not measured; put the published `{TRACE.name}` into `.bench-env/{TRACE.parent}/`."
        )
    _generated(body, options)
    _tiers(body, options)
    _decisions(body, options)
    return body


def _sizes(options: BenchOptions) -> tuple[int, ...]:
    return SIZES[:2] if options.quick else SIZES


def _way(found: dict[str, float]) -> float:
    """Return how far a policy gets from LRU (0) to the clairvoyant (1)."""
    room = found["clairvoyant"] - found["lru"]
    return (found["spillway"] - found["lru"]) / room if room > 0 else 0.0


def _measure(names: Sequence[str], requests: Sequence[Request], size: int) -> dict[str, float]:
    found = {name: kv_rule.hit_rate(name, requests, size) for name in names}
    return {**found, "clairvoyant": kv_rule.clairvoyant(requests, size)}


def _mooncake(body: Body, requests: Sequence[Request], options: BenchOptions) -> None:
    names = ("lru", "s3fifo", "pensieve", "spillway")
    found: dict[int, dict[str, float]] = {}
    for size in _sizes(options):
        found[size] = _measure(names, requests, size)
        found[size]["informed"] = kv_rule.informed(requests, size)
    columns = ["pages", *names, "knows how often", "clairvoyant", "spillway's way from LRU"]
    rows = [
        [f"{size:,}", *(f"{100 * at[n]:.1f}%" for n in (*names, "informed", "clairvoyant")), f"{_way(at):.0%}"]
        for size, at in found.items()
    ]  # fmt: skip
    body.table("Mooncake's synthetic trace, one tier: share of pages held", columns, rows)
    body.samples["Mooncake"] = {str(size): at for size, at in found.items()}
    below = any(at["spillway"] < at["lru"] for at in found.values())
    far = all(_way(found[size]) >= 0.25 for size in (1000, 5000) if size in found)
    body.met["Mooncake's trace"] = "missed" if below else "goal" if far else "must"


def _generated(body: Body, options: BenchOptions) -> None:
    names = ("lru", "s3fifo", "spillway")
    rows, below = [], 0.0
    for skew in SKEWS[1:2] if options.quick else SKEWS:
        requests = kv_traces.generate(options.pick(3000, 400), skew, FRESH + options.seed)
        kind = "conversations" if math.isinf(skew) else f"skew {skew:g}"
        for size in _sizes(options):
            at = _measure(names, requests, size)
            cells = [f"{100 * at[name]:.1f}%" for name in (*names, "clairvoyant")]
            rows.append([kind, f"{size:,}", *cells, f"{_way(at):.0%}"])
            body.samples[f"{kind}/{size}"] = at
            below = max(below, at["lru"] - at["spillway"])
    columns = ["load", "pages", *names, "clairvoyant", "spillway's way from LRU"]
    title = "Generated loads, one tier: half conversations, half questions about documents of this popularity"
    body.table(title, columns, rows)
    word = "goal" if below <= 0 else "must" if below <= SLIP else "missed"
    body.met["generated loads: never below LRU"] = word


def _tiers(body: Body, options: BenchOptions) -> None:
    rows = []
    seeds = options.rounds(2, 1)
    kinds = [(name, name, True) for name in NAMES]
    kinds.append(("lru-conversation, as few as it takes", "lru-conversation", False))
    for rate, host in TIERS[2:] if options.quick else TIERS:
        for kind, name, one_by_one in kinds:
            count = options.pick(1100, 150)
            setting = Setting(rate, host // PAGE, conversations=count, one_by_one=one_by_one)
            found = [Simulation(name, setting, options.seed + n).run() for n in range(seeds)]
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
