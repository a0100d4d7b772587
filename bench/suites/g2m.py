"""G2M: deployments of this machine, as the simulation predicts them and as they serve grounded chats.

Candidates are drawn by the seed. Each is started from its plan, answers a closed loop of clients (its capacity), and
then Poisson arrivals at shares of the predicted capacity. Predictions use the same arrivals.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bench.document import BenchOptions, Body
from bench.partial import PartialResults
from bench.workloads import grounded_load, machine_costs
from bench.workloads.machine_costs import MachineCalibration, calibrate, joined
from cli.planned_services import fingerprint
from cli.profile import StartedInstance, started
from loadgen import arrivals
from loadgen.chat.client import Chat
from loadgen.chat.load import ChatLoad
from loadgen.target import Target
from planner.deployment import DeploymentPlan, MachineFingerprint, PlannedPerformance
from planner.load_simulation import LoadSimulation, RagLoad, predict_capacity, predict_ttft
from planner.machine_candidates import MachineCandidate, MachineCosts, candidates, draw

DRAWN, QUICK_DRAWN = 4, 2
SHARES = (0.3, 0.6, 0.9)  # of the predicted capacity
CLIENTS = 16
CAPACITY_S, HOLD_S, WARM_S = 45.0, 75.0, 8.0
QUICK_S, QUICK_WARM_S = 4.0, 1.0
TTFT_WITHIN, CAPACITY_WITHIN = 0.15, 0.20
NEAR = 1.05  # capacities whose predictions are closer than this have no order
# Room for all clients at once on the device, and no tier below it: nothing is moved while times are measured.
_CACHE = {"SPILLWAY_KV_BYTES": str(256 << 20), "SPILLWAY_HOST_KV_BYTES": "0"}
_MODEL = "llama-42m-demo-words"


class RateHold(msgspec.Struct):
    """Poisson arrivals of a rate for some seconds: the median time to the first token, and how many have no answer."""

    rate: float
    seconds: float
    seed: int
    ttft_s: float
    asked: int
    failed: int


class MeasuredDeployment(msgspec.Struct):
    """What a deployment did: requests a second of a closed loop, and its holds by share of the predicted capacity."""

    capacity: float | None = None
    holds: dict[str, RateHold] = {}


class MachineKept(msgspec.Struct):
    """What has been measured so far: calibrations by threads, deployments by name."""

    calibrations: dict[str, MachineCalibration] = {}
    deployments: dict[str, MeasuredDeployment] = {}


def run(options: BenchOptions) -> Body:
    """Measure what the partial file lacks (quick: two deployments, seconds), and compare it with the predictions."""
    body = Body()
    partial = PartialResults(options, MachineKept)
    machine = fingerprint()
    model = grounded_load.write_model(options.setup_dir / "models" / _MODEL)
    for threads in threads_of(machine.cores):
        if str(threads) not in partial.kept.calibrations and partial.begins():
            partial.kept.calibrations[str(threads)] = _calibrated(machine, model, threads, options)
            partial.save()
    if len(partial.kept.calibrations) == len(threads_of(machine.cores)):
        costs, load = joined([*partial.kept.calibrations.values()])
        for candidate in drawn(machine.cores, options):
            _measure(candidate, costs, load, partial, machine, model, options)
        describe(body, partial.kept, machine.cores, options)
    body.left = partial.left
    return body


def threads_of(cores: int) -> list[int]:
    """Return the threads of a worker that are planned with: one, and all cores."""
    return sorted({1, cores})


def drawn(cores: int, options: BenchOptions) -> list[MachineCandidate]:
    """Return the candidates that the seed draws, the count of the options or the row's own."""
    every = [*candidates(threads_of(cores), cores)]
    count = options.count or options.pick(DRAWN, QUICK_DRAWN)
    return draw(every, min(count, len(every)), options.seed)


def plan_of(
    candidate: MachineCandidate,
    machine: MachineFingerprint,
    model: Path,
    *,
    qps: float,
    ttft_s: float,
) -> DeploymentPlan:
    """Return the plan of a candidate on this machine."""
    return DeploymentPlan(
        machine=machine,
        services=candidate.services({"SPILLWAY_CHAT_MODEL": str(model), **_CACHE}),
        predicted=PlannedPerformance(ttft_s=ttft_s, qps=qps, binds="prefix"),
    )


# -- what is measured -------------------------------------------------------------------------------


def _calibrated(
    machine: MachineFingerprint, model: Path, threads: int, options: BenchOptions
) -> MachineCalibration:
    plan = plan_of(
        MachineCandidate(1, threads, own_encoder=False, running=8),
        machine,
        model,
        qps=0.0,
        ttft_s=0.0,
    )
    reps = machine_costs.QUICK if options.quick else machine_costs.FULL
    with started(plan) as instance:
        asyncio.run(_filled(instance, options))
        return asyncio.run(calibrate(instance, threads, reps))


def _measure(
    candidate: MachineCandidate,
    costs: MachineCosts,
    load: RagLoad,
    partial: PartialResults[MachineKept],
    machine: MachineFingerprint,
    model: Path,
    options: BenchOptions,
) -> None:
    """Measure of one deployment what is not kept yet; it is started once."""
    simulated = candidate.simulated(costs, machine.cores)
    capacity = predict_capacity(simulated, load, clients=CLIENTS)
    measured = partial.kept.deployments.setdefault(candidate.name, MeasuredDeployment())
    shares = [share for share in SHARES if str(share) not in measured.holds]
    missing = len(shares) + (measured.capacity is None)
    if not missing or not partial.begins(missing):
        return
    ttft_s = predict_ttft(simulated, load, 0.3 * capacity)
    with started(plan_of(candidate, machine, model, qps=capacity, ttft_s=ttft_s)) as instance:
        asyncio.run(_filled(instance, options))
        if measured.capacity is None:
            measured.capacity = asyncio.run(_capacity(instance, options))
            partial.save()
        for share in shares:
            if partial.begins():
                seed = options.seed * 1000 + round(100 * share)
                hold = _hold(instance, share * capacity, seed, options)
                measured.holds[str(share)] = asyncio.run(hold)
                partial.save()


async def _filled(instance: StartedInstance, options: BenchOptions) -> None:
    documents = options.pick(grounded_load.DOCUMENTS, grounded_load.QUICK_DOCUMENTS)
    await grounded_load.fill(instance.url, documents)
    async with Chat([instance.url]) as chat, Target([instance.url]) as target:
        warm = ChatLoad(chat, target, grounded_load.questions(1), grounded_load.asking())
        await warm.closed(2, count=6)


async def _capacity(instance: StartedInstance, options: BenchOptions) -> float:
    """Return the answers a second of a closed loop of clients."""
    seconds, warm_s = (QUICK_S, QUICK_WARM_S) if options.quick else (CAPACITY_S, WARM_S)
    async with Chat([instance.url]) as chat, Target([instance.url]) as target:
        load = ChatLoad(chat, target, grounded_load.questions(2), grounded_load.asking())
        talk = await load.closed(CLIENTS, seconds=seconds)
    ends = [each.done_s for each in talk.replies if each.ok and warm_s <= each.done_s <= seconds]
    return len(ends) / (seconds - warm_s)


async def _hold(
    instance: StartedInstance, rate: float, seed: int, options: BenchOptions
) -> RateHold:
    seconds = QUICK_S if options.quick else HOLD_S
    async with Chat([instance.url]) as chat, Target([instance.url]) as target:
        load = ChatLoad(chat, target, grounded_load.questions(seed), grounded_load.asking())
        talk = await load.open(arrivals.poisson(rate, random.Random(seed)), seconds)
    ttfts = [each.ttft_s for each in talk.replies if each.ok and each.ttft_s is not None]
    failed = len(talk.replies) - len(ttfts)
    ttft_s = statistics.median(ttfts) if ttfts else float("nan")
    return RateHold(rate, seconds, seed, ttft_s, len(talk.replies), failed)


# -- what is told -----------------------------------------------------------------------------------


def predicted_ttft(
    hold: RateHold, candidate: MachineCandidate, kept: MachineKept, cores: int
) -> float:
    """Return the median time to the first token that the simulation gives the arrivals of a hold."""
    costs, load = joined([*kept.calibrations.values()])
    due = itertools.takewhile(
        lambda at: at < hold.seconds, arrivals.poisson(hold.rate, random.Random(hold.seed))
    )
    found = LoadSimulation(candidate.simulated(costs, cores), load).run(due)
    return statistics.median(each.ttft_s for each in found)


def ranked_right(predicted: Sequence[float], measured: Sequence[float]) -> bool:
    """Return whether every two that are predicted to differ by NEAR or more are in the same order as measured."""
    pairs = itertools.combinations(zip(predicted, measured, strict=True), 2)
    return all(
        (one[0] < other[0]) == (one[1] < other[1])
        for one, other in pairs
        if max(one[0], other[0]) >= NEAR * min(one[0], other[0])
    )


def describe(body: Body, kept: MachineKept, cores: int, options: BenchOptions) -> None:
    """Add the tables, the samples and the goals of what has been measured."""
    body.samples["kept"] = msgspec.to_builtins(kept)
    costs, load = joined([*kept.calibrations.values()])
    rows, off, capacities = [], list[float](), list[tuple[float, float]]()
    for candidate in drawn(cores, options):
        measured = kept.deployments.get(candidate.name, MeasuredDeployment())
        capacity = predict_capacity(candidate.simulated(costs, cores), load, clients=CLIENTS)
        cells = ["-"]
        if measured.capacity:
            capacities.append((capacity, measured.capacity))
            cells = [f"{measured.capacity:.2f} ({_off(capacity, measured.capacity):+.0%})"]
        for share in SHARES:
            hold = measured.holds.get(str(share))
            if hold is None:
                cells.append("-")
                continue
            ttft_s = predicted_ttft(hold, candidate, kept, cores)
            off.append(abs(_off(ttft_s, hold.ttft_s)))
            cells.append(
                f"{1e3 * hold.ttft_s:.0f} / {1e3 * ttft_s:.0f} ({_off(ttft_s, hold.ttft_s):+.0%})"
            )
        rows.append([candidate.name, f"{capacity:.2f}", *cells])
    columns = ["deployment", "requests/s predicted", "measured (prediction off by)"]
    columns += [f"first token ms at {share:.0%}: measured / predicted" for share in SHARES]
    body.table("Deployments of this machine", columns, rows)
    far = [abs(_off(*each)) for each in capacities]
    body.samples |= {"capacity/furthest": max(far, default=0.0)}
    body.samples |= {"first token/furthest": max(off, default=0.0)}
    body.met.update(_goals(capacities, off))
    body.notes += [*_notes(kept, load, options)]


def _off(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def _goals(capacities: Sequence[tuple[float, float]], off: Sequence[float]) -> dict[str, str]:
    """Return the goals that were met; none of what was not measured."""
    found = {}
    if len(capacities) > 1:
        right = ranked_right(*zip(*capacities, strict=True))
        found["ranking of deployments"] = "goal" if right else "missed"
        far = max(abs(_off(*each)) for each in capacities)
        found["capacity within 20 %"] = "goal" if far <= CAPACITY_WITHIN else "missed"
    if off:
        found["first token within 15 %"] = "goal" if max(off) <= TTFT_WITHIN else "missed"
    return found


def _notes(kept: MachineKept, load: RagLoad, options: BenchOptions) -> Iterator[str]:
    yield (
        f"Grounded chats, {load.prompt_tokens} prompt tokens that no cache holds and {load.answer_tokens} of answer, "
        "by a model of 42 million random weights. "
        f"Deployments are drawn by seed {options.seed}; capacity is that of {CLIENTS} clients. "
        "Calibrated on an idle mesh, before and apart from the deployments that are measured."
    )
    for each in kept.calibrations.values():
        step = each.worker.step
        yield (
            f"Threads {each.threads}: step {1e3 * step.base_s:.2f} ms + {1e6 * step.token_s:.0f} µs a prompt token + "
            f"{1e3 * step.row_s:.2f} ms a sequence, embedding {1e3 * each.worker.embed.seconds(1):.2f} ms, search "
            f"{1e3 * each.search.seconds(1):.2f} ms, router {1e3 * each.request_s:.2f} ms a request and "
            f"{1e3 * each.token_s:.2f} ms a token, messages {1e3 * each.hop_s:.2f} ms; first token alone "
            f"{1e3 * each.ttft_s:.1f} ms."
        )
    failed = sum(hold.failed for each in kept.deployments.values() for hold in each.holds.values())
    if failed:
        yield f"WRONG: {failed} requests were refused or failed."
