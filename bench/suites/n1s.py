"""N1S: NEO's scheduler under a virtual clock, by rooflines of the paper's machines: figures 6, 7, 8b, 9 and 10a."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.document import BenchOptions, Body
from bench.simulation.host_offload import (
    OffloadRequest,
    OffloadRun,
    OffloadSimulation,
    arriving,
    synthetic,
)
from bench.simulation.rooflines import (
    A10G,
    H100,
    LLAMA_7B,
    LLAMA_8B,
    LLAMA_70B,
    T4,
    ModelSize,
    RooflineMachine,
    costs,
    points,
)
from common.pages.identity import PAGE
from engine.decoder.executor.interface import LocalTier
from engine.decoder.offload.costs import OffloadProfile
from engine.decoder.offload.plan import (
    DecodeState,
    OffloadLimits,
    OffloadMode,
    OffloadState,
    PoolState,
    PromptState,
    pages_of,
)
from engine.decoder.offload.scheduler import schedule

DEVICE, NEO = OffloadMode.DEVICE, OffloadMode.ASYMMETRIC
LIMITS = OffloadLimits(4096, 512)
OUTPUTS = (25, 50, 100, 200, 400, 800)
SHORT = OUTPUTS[:3]  # of a quick run
LEAST = 0.95  # of the device alone, in every cell (specification, section 4)
PEAKS = {"g5.2xlarge": 12.2, "g5.4xlarge": 13.3, "g5.8xlarge": 29.7, "g5.16xlarge": 79.3}
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class Setting(NamedTuple):
    """A machine with a model, the prompts of figure 9, and what arrives for figure 6."""

    machine: RooflineMachine
    model: ModelSize
    prompt: int
    paper: str
    lengths: tuple[float, float] = (0, 0)
    rates: tuple[float, ...] = ()
    longest: int = 8000
    limit_s: float = 2.0


_A10G = A10G["g5.4xlarge"]._replace(name="A10G")
_SLOW = _A10G._replace(name="A10G, host 25 GB/s", host_bytes_s=25e9)
SETTINGS = (
    Setting(H100, LLAMA_70B, 2000, "14 %", (1700, 25), (1.0, 2.0, 3.0, 4.0, 6.0, 10.0)),
    Setting(_A10G, LLAMA_8B, 1000, "26 %", (1700, 25), (0.4, 0.8, 1.2, 1.6, 2.0, 3.0, 5.0)),
    Setting(_SLOW, LLAMA_8B, 1000, "-"),
    Setting(T4[2400], LLAMA_7B, 250, "-"),
    Setting(
        T4[1024], LLAMA_7B, 250, "-", (200, 40), (0.2, 0.4, 0.8, 1.2, 1.6, 2.4, 4.0, 8.0), 900, 1.0
    ),
    Setting(T4[640], LLAMA_7B, 250, "750 %"),
)
SPREAD_AT = 1.6  # requests a second on the A10G for figure 7
FEW = 24  # requests of a quick run


def run(options: BenchOptions) -> Body:
    """Simulate every figure (quick: few requests)."""
    body = Body()
    body.notes.append(
        "Simulated: stages take what rooflines of bytes, operations and bandwidths say; no accelerator stands "
        "behind these times. Throughput is tokens of prompts and answers by the seconds until the last request is "
        "served; a gain is by the same scheduler with the device alone."
    )
    gains = _lengths(body, options)
    _hosts(body, options, gains[SETTINGS[1].machine.name])
    _modes(body, options)
    _loads(body, options)
    _profiles(body, options)
    _planning(body, options)
    return body


def _run(
    setting: Setting, requests: Sequence[OffloadRequest], mode: OffloadMode = NEO
) -> OffloadRun:
    machine = setting.machine
    tokens = machine.device_tokens, machine.host_tokens
    model = costs(machine, setting.model)
    return OffloadSimulation(requests, LIMITS, model, tokens, mode).run()


def _gains(setting: Setting, options: BenchOptions, mode: OffloadMode = NEO) -> list[float]:
    """Return the throughput of a mode by the device's, for every output length that the device can hold."""
    found = []
    for output in SHORT if options.quick else OUTPUTS:
        if 1.1 * (setting.prompt + output) + 1 > setting.machine.device_tokens - PAGE:
            continue
        work = synthetic(options.rounds(150, FEW), setting.prompt, output, options.seed)
        found.append(_run(setting, work, mode).throughput / _alone(setting, work))
    return found


def _alone(setting: Setting, work: Sequence[OffloadRequest]) -> float:
    return _run(setting, work, DEVICE).throughput


def _cells(gains: Sequence[float]) -> list[str]:
    """Return the cells of a row; answers that the device cannot hold, or that were not asked for, have none."""
    return [*(f"{gain:.2f}" for gain in gains), *["-"] * (len(OUTPUTS) - len(gains))]


# -- figures 9, 10a and 8b -----------------------------------------------------------------------


def _lengths(body: Body, options: BenchOptions) -> dict[str, list[float]]:
    found, rows = {}, []
    for setting in SETTINGS:
        machine = setting.machine
        gains = found[machine.name] = _gains(setting, options)
        body.samples[f"figure 9/{machine.name}"] = gains
        held = f"{machine.device_tokens:,} / {machine.host_tokens:,}"
        rows.append([
            machine.name, setting.model.name, held, str(setting.prompt), *_cells(gains),
            f"{max(gains):.2f}", setting.paper,
        ])  # fmt: skip
    columns = ["machine", "model", "KV tokens, device / host", "prompt"]
    columns += [*(f"answer {output}" for output in OUTPUTS), "peak", "paper: up to"]
    body.table("Figure 9: throughput by the device alone's, by tokens of an answer", columns, rows)
    least = min(min(gains) for gains in found.values())
    body.met["never much slower than the device alone"] = "goal" if least >= LEAST else "missed"
    tight = [max(found[each.name]) for each in (T4[2400], T4[1024], T4[640])]
    body.met["fewer KV tokens gain more"] = "goal" if tight == sorted(tight) else "missed"
    first = found[H100.name]
    risen = max(first) > first[0] and max(first) > first[-1]
    near = abs(first[-1] - 1) <= 1 - LEAST
    body.met["rise to a balance point, fall towards 1"] = "goal" if risen and near else "missed"
    body.notes.append(
        f"Figure 9: {options.rounds(150, FEW)} requests, all there at once, lengths uniform within a tenth. The paper "
        "does not say how many tokens of keys and values its devices had room for, and the T4's gain follows from that "
        "number alone: so it stands in the table. Rise and fall are judged on the H100's, where the host attends to "
        "nearly nothing while the device decodes; an A10G's host adds a tenth of the device's bandwidth at any length."
    )
    return found


def _hosts(body: Body, options: BenchOptions, middle: list[float]) -> None:
    rows, peaks = [], []
    for name, machine in A10G.items():
        setting = SETTINGS[1]._replace(machine=machine)
        gains = middle if name == "g5.4xlarge" else _gains(setting, options)
        body.samples[f"figure 10a/{name}"] = gains
        peaks.append(max(gains))
        rows.append([
            name, f"{machine.host_bytes_s / 1e9:.0f}", f"{machine.host_tokens:,}", *_cells(gains),
            f"{max(gains):.2f}", f"{1 + PEAKS[name] / 100:.3f}",
        ])  # fmt: skip
    columns = ["instance", "host GB/s", "host KV tokens"]
    columns += [*(f"answer {output}" for output in OUTPUTS), "peak", "paper's peak"]
    body.table("Figure 10a: an A10G beside hosts of four bandwidths", columns, rows)
    ordered = abs(peaks[0] - peaks[1]) < 0.05 and peaks[1] < peaks[2] < peaks[3]
    body.met["more host bandwidth gains more"] = "goal" if ordered else "missed"


def _modes(body: Body, options: BenchOptions) -> None:
    rows, full = [], list[float]()
    for setting in (SETTINGS[1], SETTINGS[4]):
        for mode in OffloadMode:
            if mode is DEVICE:
                continue
            gains = _gains(setting, options, mode)
            body.samples[f"modes/{setting.machine.name}/{mode}"] = gains
            rows.append([setting.machine.name, mode.value, *_cells(gains)])
            if mode is OffloadMode.FULL and setting is SETTINGS[1]:
                full = gains
    columns = ["machine", "mode", *(f"answer {output}" for output in OUTPUTS)]
    body.table("Other ways to use the host, by the device alone", columns, rows)
    body.met["full offload falls below 1 at long answers"] = "goal" if full[-1] < 1 else "missed"


# -- figures 6 and 7 -----------------------------------------------------------------------------


def _loads(body: Body, options: BenchOptions) -> None:
    rows, spread, higher = [], [], True
    for setting in (each for each in SETTINGS if each.rates):
        means: dict[OffloadMode, list[float]] = {}
        for mode in (DEVICE, NEO):
            for rate in setting.rates:
                found = _run(setting, _arriving(setting, rate, options), mode).latencies_s
                means.setdefault(mode, []).append(float(np.mean(found)))
                name = f"figure 6/{setting.machine.name}/{mode}/{rate:g}"
                body.samples[name] = np.quantile(found, QUANTILES).tolist()
                if rate == SPREAD_AT and setting is SETTINGS[1]:
                    cells = [f"{1000 * q:.0f}" for q in np.quantile(found, QUANTILES)]
                    spread.append([mode.value, *cells])
        reached = [_rate_at(setting, means[mode]) for mode in (DEVICE, NEO)]
        higher = higher and reached[1] >= LEAST * reached[0]
        for mode, at in zip((DEVICE, NEO), reached, strict=True):
            pairs = zip(setting.rates, means[mode], strict=True)
            curve = ", ".join(f"{rate:g}: {mean:.2f}" for rate, mean in pairs)
            gain = f"{100 * (at / reached[0] - 1):+.1f} %" if max(reached) < math.inf else "-"
            rows.append(
                [
                    setting.machine.name,
                    mode.value,
                    curve,
                    f"{setting.limit_s:g} s",
                    f"{at:.2f}" if at < math.inf else f"> {setting.rates[-1]:g}",
                    gain,
                ]
            )
    columns = [
        "machine",
        "mode",
        "requests/s: mean seconds a token",
        "limit",
        "requests/s at the limit",
        "gain",
    ]
    body.table("Figure 6: latency by load", columns, rows)
    columns = ["mode", *(f"p{100 * q:g}, ms a token" for q in QUANTILES)]
    body.table(f"Figure 7: latencies on the A10G at {SPREAD_AT} requests/s", columns, spread)
    body.met["as much load at the latency limit"] = "goal" if higher else "missed"
    body.notes.append(
        f"Figure 6: {options.rounds(300, FEW)} requests, arriving at random; lengths are lognormal (0.6) around "
        "medians of 1,700 and 25 tokens (H100, A10G) and 200 and 40 (T4), since the paper's traces are not at hand: "
        "its +14.3 %, +6.4 % and +563 % are of other lengths. A request's latency is divided by its answer's tokens."
    )


def _arriving(setting: Setting, rate: float, options: BenchOptions) -> list[OffloadRequest]:
    longest = min(setting.longest, int(0.9 * setting.machine.device_tokens) - PAGE)
    count = options.rounds(300, FEW)
    return arriving(count, rate, setting.lengths, options.seed, longest=longest)


def _rate_at(setting: Setting, means: Sequence[float]) -> float:
    """Return the load at which the mean latency reaches the limit, between two loads; infinite if none reaches it."""
    for place, mean in enumerate(means):
        if mean > setting.limit_s:
            if not place:
                return setting.rates[0]
            before, low, high = means[place - 1], setting.rates[place - 1], setting.rates[place]
            return low + (high - low) * (setting.limit_s - before) / (mean - before)
    return math.inf


# -- beyond the figures --------------------------------------------------------------------------


def _profiles(body: Body, options: BenchOptions) -> None:
    """Let the host be slower or faster than the profile says, and let the scheduler find out."""
    setting, rows, better = SETTINGS[1], [], True
    tokens = setting.machine.device_tokens, setting.machine.host_tokens
    work = synthetic(options.rounds(150, FEW), setting.prompt, 100, options.seed)
    profile = points(costs(setting.machine, setting.model))
    for factor in (0.25, 0.5, 1.0, 2.0):
        machine = setting.machine._replace(host_bytes_s=factor * setting.machine.host_bytes_s)
        true = costs(machine, setting.model)
        alone = _alone(setting, work)
        fixed, learned, known = (
            OffloadSimulation(
                work, LIMITS, true, tokens, NEO, profile=OffloadProfile(found), learns=learns
            )
            .run()
            .throughput
            / alone
            for found, learns in ((profile, False), (profile, True), (points(true), False))
        )
        body.samples[f"profile/{factor:g}"] = [fixed, learned, known]
        better = better and learned >= LEAST * max(known, fixed)
        rows.append([f"{factor:g} x", f"{fixed:.2f}", f"{learned:.2f}", f"{known:.2f}"])
    columns = ["host, by the profile", "profile kept", "re-fitted", "known"]
    body.table("A10G, answers of 100: a host that is not as profiled", columns, rows)
    body.met["a wrong profile is learned"] = "goal" if better else "missed"


def _planning(body: Body, options: BenchOptions) -> None:
    """Time the planning of a step of 200 requests."""
    rows, slowest = [], 0.0
    model = costs(SETTINGS[1].machine, SETTINGS[1].model)
    for device, host, prompts in ((100, 100, 0), (40, 150, 10), (10, 180, 10)):
        state = crowd(device, host, prompts, options.seed)
        seconds = []
        for _ in range(options.rounds(400, 5)):
            began = time.perf_counter()
            plan = schedule(state, LIMITS, model)
            seconds.append(time.perf_counter() - began)
        middle = float(np.median(seconds))
        slowest = max(slowest, middle)
        body.samples[f"planning/{device}/{host}/{prompts}"] = seconds
        rows.append([
            str(device), str(host), str(prompts), f"{1000 * middle:.2f}",
            f"{1000 * float(np.quantile(seconds, 0.99)):.2f}", f"{plan.examined}",
        ])  # fmt: skip
    columns = ["on the device", "on the host", "prompts", "ms, median", "p99", "sequences examined"]
    body.table("Planning one step of 200 requests", columns, rows)
    body.met["planning"] = "goal" if slowest <= 1e-3 else "missed"


def crowd(device: int, host: int, prompts: int, seed: int) -> OffloadState:
    """Return a state of so many sequences of random length on each side, and prompts that wait."""
    draw = random.Random(seed)
    decoding = []
    for order in range(device + host):
        length, on_host = draw.randint(100, 1500), order >= device
        skipped = draw.randrange(31) if on_host else 0
        home: LocalTier = "host" if on_host else "device"
        pages = pages_of(length - 1)
        decoding.append(DecodeState(order, home, length, pages, skipped=skipped))
    waiting = [
        PromptState(device + host + number, ((0, draw.randint(500, 1500)),))
        for number in range(prompts)
    ]
    return OffloadState(
        tuple(waiting), tuple(decoding), PoolState(9000, 100), PoolState(9000, 3000)
    )
