"""Simulation of a deployment under load: seconds to the first token and requests a second, from measured times.

Processes share the cores of one machine: while more threads compute than there are cores, all of them slow down alike.
A request passes the router, is embedded (where a worker embeds), searched for and generated. A worker computes one
thing at a time: a batch of texts to embed, or a step of generation, in which every running sequence gets a token and
new prompts are read up to the step's limit of tokens.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_TEXTS = 32  # of one batch to embed
_SETTLING = 0.1  # the share of the first requests that is not counted
_NEVER = math.inf


class LineCost(NamedTuple):
    """Seconds of a piece of work that consists of n items: base_s + item_s * n, on a machine that does nothing else."""

    base_s: float
    item_s: float = 0.0

    def seconds(self, items: float) -> float:
        """Return the seconds of so many items."""
        return self.base_s + self.item_s * items


NOTHING = LineCost(0.0)


class StepSeconds(NamedTuple):
    """Seconds of a step of generation: base_s + token_s for each prompt token read + row_s for each sequence."""

    base_s: float
    token_s: float
    row_s: float

    def seconds(self, tokens: int, rows: int) -> float:
        """Return the seconds of a step that reads so many tokens of prompts and generates for so many sequences."""
        return self.base_s + self.token_s * tokens + self.row_s * rows


@dataclass(frozen=True, slots=True)
class SimulatedWorker:
    """A worker process: its threads, what it serves (None: not), the limits of its steps, and its weight.

    Where threads share cores, a thread of half the weight gets half the time.
    """

    threads: int
    embed: LineCost | None = None
    step: StepSeconds | None = None
    max_running: int = 64
    step_tokens: int = 512
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedDeployment:
    """Workers, one search process and one router on so many cores; `hop_s` is spent waiting, not computing.

    `request_s` are the router's seconds for a request before it is embedded, `token_s` those for each token it
    delivers, those of Redis and of clients on the same machine included.
    """

    cores: int
    workers: tuple[SimulatedWorker, ...]
    search: LineCost = NOTHING
    search_threads: int = 1
    request_s: float = 0.0
    token_s: float = 0.0
    hop_s: float = 0.0


class RagLoad(NamedTuple):
    """What each request asks: tokens of its prompt, tokens of its answer."""

    prompt_tokens: int
    answer_tokens: int


class SimulatedRequest(NamedTuple):
    """A request's moments in seconds: it arrived, its first token was delivered, its last one."""

    arrived_s: float
    first_s: float
    done_s: float

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.arrived_s


@dataclass(slots=True)
class _Sequence:
    """A request under way."""

    arrived_s: float
    unread: int
    left: int
    undelivered: int
    first_s: float = -1.0


@dataclass(slots=True)
class _Process:
    """A process that computes one task at a time: what is left of it, and what its end does."""

    threads: int
    weight: float = 1.0
    left_s: float = 0.0
    rate: float = 1.0
    end: Callable[[], None] | None = None
    running: list[_Sequence] = field(default_factory=list)
    turn: bool = False  # of a worker that does both: whether it embedded last


class LoadSimulation:
    """One run of requests through a deployment; `run` may be called once."""

    def __init__(self, deployment: SimulatedDeployment, load: RagLoad) -> None:
        self._deployment, self._load = deployment, load
        self._router, self._search = _Process(1), _Process(deployment.search_threads)
        self._workers = [(_Process(each.threads, each.weight), each) for each in deployment.workers]
        self._embeds = any(each.embed is not None for each in deployment.workers)
        self._routing: deque[tuple[float, Callable[[], None]]] = deque()
        self._embedding: deque[_Sequence] = deque()
        self._searching: deque[_Sequence] = deque()
        self._generating: deque[_Sequence] = deque()
        self._waiting: list[tuple[float, _Sequence]] = []  # in a hop, by when it ends
        self._now = 0.0
        self._again = 0
        self._done: list[SimulatedRequest] = []

    def run(self, arrivals: Iterable[float], again: int = 0) -> list[SimulatedRequest]:
        """Return every request in the order in which they ended; `arrivals` are rising seconds, and finite.

        `again` further requests are begun, one whenever one has ended.
        """
        self._again = again
        coming = iter(arrivals)
        due = next(coming, None)
        while True:
            self._begin()
            at = self._next(_NEVER if due is None else due)
            if at == _NEVER:
                return self._done
            self._advance(at)
            while due is not None and due <= self._now:
                self._arrive(due)
                due = next(coming, None)

    # -- time --------------------------------------------------------------------------------------

    def _processes(self) -> Iterator[_Process]:
        yield self._router
        yield self._search
        yield from (process for process, _ in self._workers)

    def _share_cores(self) -> list[_Process]:
        """Set the rate of every process that computes, and return them."""
        computing = [each for each in self._processes() if each.end is not None]
        # From the heaviest thread on, since a core is the most that any gets: the others share what it leaves.
        left = float(self._deployment.cores)
        weights = sum(each.threads * each.weight for each in computing)
        for each in sorted(computing, key=lambda each: -each.weight):
            each.rate = min(1.0, left * each.weight / weights)
            left -= each.threads * each.rate
            weights -= each.threads * each.weight
        return computing

    def _next(self, due: float) -> float:
        """Return when something happens next."""
        ends = [self._now + each.left_s / each.rate for each in self._share_cores()]
        hop = min((at for at, _ in self._waiting), default=_NEVER)
        return min(due, hop, *ends)

    def _advance(self, to: float) -> None:
        """Let time pass, and end what ends then."""
        passed, self._now = to - self._now, to
        ending = []
        for each in self._processes():
            if each.end is not None:
                each.left_s -= passed * each.rate
                if each.left_s <= 1e-12:
                    ending.append(each)
        for each in ending:
            end, each.end = each.end, None
            if end is not None:
                end()
        for hop in [hop for hop in self._waiting if hop[0] <= to]:
            self._waiting.remove(hop)
            first = self._embedding if self._embeds else self._searching
            first.append(hop[1])

    # -- the way of a request ----------------------------------------------------------------------

    def _arrive(self, at: float) -> None:
        prompt, answer = self._load
        new = _Sequence(at, prompt, answer, answer)
        hop_s = self._deployment.hop_s
        self._routing.append(
            (
                self._deployment.request_s,
                lambda: self._waiting.append((self._now + hop_s, new)),
            )
        )

    def _begin(self) -> None:
        """Let every idle process begin what there is for it."""
        if self._router.end is None and self._routing:
            self._router.left_s, self._router.end = self._routing.popleft()
        if self._search.end is None and self._searching:
            found = list(self._searching)
            self._searching.clear()
            self._search.left_s = self._deployment.search.seconds(len(found))
            self._search.end = lambda: self._generating.extend(found)
        for process, kind in self._workers_by_room():
            if process.end is None:
                self._begin_worker(process, kind)

    def _workers_by_room(self) -> list[tuple[_Process, SimulatedWorker]]:
        return sorted(self._workers, key=lambda each: len(each[0].running))

    def _begin_worker(self, process: _Process, kind: SimulatedWorker) -> None:
        embeds = kind.embed is not None and bool(self._embedding)
        if kind.step is not None:
            while self._generating and len(process.running) < kind.max_running:
                process.running.append(self._generating.popleft())
                if self._shares_with_idle(process):
                    break
        generates = bool(process.running)
        if embeds and kind.embed is not None and not (generates and process.turn):
            texts = [
                self._embedding.popleft() for _ in range(min(MOST_TEXTS, len(self._embedding)))
            ]
            process.left_s, process.turn = kind.embed.seconds(len(texts)), True
            process.end = lambda: self._searching.extend(texts)
        elif generates and kind.step is not None:
            process.turn = False
            self._step(process, kind, kind.step)

    def _shares_with_idle(self, process: _Process) -> bool:
        """Return whether another worker that generates is idle, and takes the next request itself."""
        return any(
            other is not process
            and kind.step is not None
            and other.end is None
            and not other.running
            for other, kind in self._workers
        )

    def _step(self, process: _Process, kind: SimulatedWorker, cost: StepSeconds) -> None:
        rows = [each for each in process.running if not each.unread]
        budget, reading = max(1, kind.step_tokens - len(rows)), list[tuple[_Sequence, int]]()
        for each in process.running:
            if each.unread and budget > 0:
                tokens = min(budget, each.unread)
                reading.append((each, tokens))
                budget -= tokens
        tokens = sum(count for _, count in reading)
        process.left_s = cost.seconds(tokens, len(rows) + len(reading))
        process.end = lambda: self._stepped(process, rows, reading)

    def _stepped(
        self, process: _Process, rows: list[_Sequence], reading: list[tuple[_Sequence, int]]
    ) -> None:
        for each, tokens in reading:
            each.unread -= tokens
        emitting = [*rows, *(each for each, _ in reading if not each.unread)]
        for each in emitting:
            each.left -= 1
        process.running = [each for each in process.running if each.left > 0]
        if emitting:
            seconds = self._deployment.token_s * len(emitting)
            self._routing.append((seconds, lambda: self._deliver(emitting)))

    def _deliver(self, emitting: Sequence[_Sequence]) -> None:
        for each in emitting:
            if each.first_s < 0:
                each.first_s = self._now
            each.undelivered -= 1
            if not each.undelivered:
                self._done.append(SimulatedRequest(each.arrived_s, each.first_s, self._now))
                if self._again:
                    self._again -= 1
                    self._arrive(self._now)


# -- what is asked of a simulation ----------------------------------------------------------------


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Return so many arrivals of a Poisson process of `rate` a second."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        found.append(now)
    return found


def predict_ttft(
    deployment: SimulatedDeployment, load: RagLoad, rate: float, *, count: int = 2000, seed: int = 1
) -> float:
    """Return the median seconds to the first token at Poisson arrivals of `rate` a second; 0: on an idle machine."""
    if rate <= 0:
        (alone,) = LoadSimulation(deployment, load).run([0.0])
        return alone.ttft_s
    found = LoadSimulation(deployment, load).run(poisson(rate, count, seed))
    counted = sorted(found, key=lambda each: each.arrived_s)[int(_SETTLING * count) :]
    ttfts = sorted(each.ttft_s for each in counted)
    return ttfts[len(ttfts) // 2]


def predict_capacity(
    deployment: SimulatedDeployment, load: RagLoad, *, clients: int, count: int = 300
) -> float:
    """Return the requests a second of so many clients, each of which asks again as soon as it is answered."""
    found = LoadSimulation(deployment, load).run([0.0] * clients, again=max(count - clients, 0))
    ends = sorted(each.done_s for each in found)
    counted = ends[min(clients, len(ends) // 4) :]  # the first ones were all begun at once
    return (len(counted) - 1) / (counted[-1] - counted[0])
