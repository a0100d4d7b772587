"""Deployments of one machine without accelerators: placement, allocation and batching, as services and as simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from planner.deployment import PlannedService
from planner.load_simulation import LineCost, SimulatedDeployment, SimulatedWorker, StepSeconds

# An encoder alone in its process leaves the cores to others (nice 10): the kernel's weights of a thread.
YIELDING = 110 / 1024
RUNNING = 1, 8
STEP_TOKENS = 512


class WorkerCosts(msgspec.Struct, frozen=True):
    """What a worker with so many threads takes: to embed texts, and for a step of generation."""

    embed: LineCost
    step: StepSeconds


class MachineCosts(msgspec.Struct, frozen=True):
    """The measured times of a machine: of workers by their threads, and of what is around them, in seconds.

    `request_s` and `token_s` are the computing of the router, Redis and the clients for a request and for a token,
    `hop_s` what a request waits for its messages.
    """

    workers: dict[int, WorkerCosts]
    search: LineCost
    request_s: float
    token_s: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class MachineCandidate:
    """A deployment: so many generating workers of so many threads; the texts embedded beside, or by an own worker.

    `running` is the most sequences that a worker generates at once.
    """

    writers: int
    threads: int
    own_encoder: bool
    running: int

    @property
    def name(self) -> str:
        """The three decisions in words."""
        encoder = "own encoder" if self.own_encoder else "encodes beside"
        return f"{self.writers} x {self.threads} threads, {encoder}, {self.running} at once"

    def services(self, generates: Mapping[str, str]) -> list[PlannedService]:
        """Return the services that run it; `generates` are the settings of the workers that generate: model, cache."""
        alone = {**generates, "SPILLWAY_MAX_RUNNING": str(self.running)}
        alone |= {"SPILLWAY_EMBED_MODEL": "none"} if self.own_encoder else {}
        encoder = PlannedService(
            "gpu_worker", 1, "encoder", 1, device="cpu", settings={"SPILLWAY_CHAT_MODEL": "none"}
        )
        return [
            PlannedService("router"),
            PlannedService(
                "gpu_worker", self.writers, threads=self.threads, device="cpu", settings=alone
            ),
            *([encoder] if self.own_encoder else []),
            PlannedService("vector_search", threads=1),
            PlannedService("kv_store"),
        ]

    def simulated(self, costs: MachineCosts, cores: int) -> SimulatedDeployment:
        """Return it as the simulation knows it; KeyError if its workers' threads were not measured."""
        known = costs.workers[self.threads]
        writer = SimulatedWorker(
            self.threads, None if self.own_encoder else known.embed, known.step, self.running, STEP_TOKENS
        )  # fmt: skip
        encoder = SimulatedWorker(1, costs.workers[1].embed, weight=YIELDING)
        return SimulatedDeployment(
            cores,
            (writer,) * self.writers + ((encoder,) if self.own_encoder else ()),
            costs.search,
            1,
            costs.request_s,
            costs.token_s,
            costs.hop_s,
        )


def candidates(threads: Sequence[int], cores: int) -> Iterator[MachineCandidate]:
    """Yield the deployments whose generating workers compute with no more threads than there are cores."""
    for each, own_encoder, running in itertools.product(threads, (False, True), RUNNING):
        for writers in sorted({1, cores // each}):
            if 1 <= writers * each <= cores:
                yield MachineCandidate(writers, each, own_encoder, running)


def draw(every: Sequence[MachineCandidate], count: int, seed: int) -> list[MachineCandidate]:
    """Return so many candidates, of which some differ in each of placement, allocation and batching.

    ValueError if there are not so many, or if all are equal in one of the three.
    """
    if not 2 <= count <= len(every):
        raise ValueError(
            f"{count} of {len(every)} candidates: expected at least 2, and no more than there are"
        )
    generator = random.Random(seed)
    for _ in range(1000):
        chosen = generator.sample(every, count)
        if all(len(each) > 1 for each in _decisions(chosen)):
            return chosen
    raise ValueError(
        "the candidates are equal in placement, in allocation or in batching; expected some that differ"
    )


def _decisions(chosen: Sequence[MachineCandidate]) -> list[set[object]]:
    """Return the values of placement, of allocation and of batching that are among some candidates."""
    return [
        {each.own_encoder for each in chosen},
        {(each.writers, each.threads) for each in chosen},
        {each.running for each in chosen},
    ]
