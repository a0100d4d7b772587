"""Holds of the mixed load on one product after another while the other stands still, stored, so that a run resumes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from bench.document import BenchOptions
from bench.mesh import proc
from bench.mesh.probe import MeshError
from bench.partial import PartialResults
from bench.peak import Peak, Speed, still_blocks
from bench.workloads import vectors
from bench.workloads.mixed_load import (
    KINDS,
    Counted,
    Hold,
    MixedLoad,
    MixShape,
    Stack,
    StackError,
    TextCorpus,
)
from bench.workloads.streamed_batch import BatchError

Start = Callable[[], contextlib.AbstractAsyncContextManager[Stack]]
SETTLE_S = 0.5
WAKE_S = 60.0
ASKED_FOR_RECALL = 200
TRIES = 3  # of a step that ends a side's climb while the machine's speed moves


class FactorRound(msgspec.Struct):
    """One load factor in one round: what each side that went so far did, and the machine's speed around it."""

    round: int
    factor: float
    sides: dict[str, Hold]
    speeds: list[Speed] = []

    @property
    def still(self) -> bool:
        """True if the machine's speed did not move during the step (`still_blocks`)."""
        return all(still_blocks(self.speeds))


class Climb(msgspec.Struct):
    """One setting of the rival as tried: its holds by load factor; `why` says why there are none."""

    name: str
    setting: dict[str, str | int]
    holds: dict[str, Hold]
    why: str = ""


class MixKept(msgspec.Struct):
    """All that was measured: settings tried, rounds of both sides, recall of each, and why a side was absent."""

    tried: list[Climb] = []
    rounds: list[FactorRound] = []
    recall: dict[str, float] = {}
    absent: dict[str, str] = {}


class Ladder(msgspec.Struct, frozen=True):
    """Load factors that rise, how long each is held and warmed, and the share below which nobody climbs on."""

    factors: tuple[float, ...]
    hold_s: float
    warm_s: float
    over: float


class MixedRuns:
    """Climbs a ladder of load factors; what `partial` holds is not measured again, what has no time is left."""

    def __init__(self, options: BenchOptions, pieces: TextCorpus, shape: MixShape) -> None:
        self._options, self._pieces, self._shape = options, pieces, shape
        self._partial = PartialResults(options, MixKept, ("tried",))
        self.kept = self._partial.kept

    @property
    def left(self) -> int:
        """Return how many climbs the options' minutes left no time for."""
        return self._partial.left

    async def climb(
        self, name: str, setting: dict[str, str | int], start: Start, ladder: Ladder
    ) -> None:
        """Try one setting of the rival, from the lowest factor to the first that is too much."""
        if any(each.name == name for each in self.kept.tried):
            return
        if not self._partial.begins():
            return
        found = Climb(name, setting, {})
        try:
            async with start() as stack:
                load = MixedLoad(stack, self._pieces, self._shape)
                await self._wake(stack)
                for factor in ladder.factors:
                    hold = await load.hold(factor, ladder.hold_s, self._options.seed)
                    found.holds[f"{factor:g}"] = hold
                    if worst(hold.counts(ladder.warm_s)) < ladder.over:
                        break
        except FileNotFoundError:
            return  # it is not set up, which the rounds will say
        except (MeshError, StackError, BatchError) as error:
            found.why = str(error)[-300:]
        self.kept.tried.append(found)
        self._partial.save()

    async def compare(self, starts: Mapping[str, Start], ladder: Ladder, rounds: int) -> None:
        """Climb with all sides in turns, round after round, each with other arrivals, the same for every side.

        A step in which a side falls short while the machine's speed moves is measured again, for all sides in it.
        """
        ended = {each.round for each in ended_rounds(self.kept.rounds, ladder)}
        left = [number for number in range(rounds) if number not in ended]
        if not left or not self._partial.begins():
            return
        peak = Peak()
        async with contextlib.AsyncExitStack() as stack:
            stacks = await self._start(stack, starts)
            for number in left:
                if self._partial.begins():
                    await self._round(number, stacks, ladder, peak)

    async def _round(
        self, number: int, stacks: Mapping[str, Stack], ladder: Ladder, peak: Peak
    ) -> None:
        seed = 1000 * self._options.seed + number
        done = {each.factor: each for each in self.kept.rounds if each.round == number}
        climbing = list(stacks)
        for place, factor in enumerate(ladder.factors):
            if factor not in done:
                turn = {
                    name: stacks[name]
                    for name in climbing[:: 1 if (number + place) % 2 == 0 else -1]
                }
                for _ in range(TRIES):
                    found = FactorRound(number, factor, {}, [peak.now()])
                    found.sides = await self._hold(turn, factor, ladder.hold_s, seed)
                    found.speeds.append(peak.now())
                    if found.still or len(_climbing(found, ladder)) == len(turn):
                        break
                self.kept.rounds.append(found)
                self._partial.save()
                done[factor] = found
            climbing = _climbing(done[factor], ladder)
            if not climbing:
                return

    async def _hold(
        self, stacks: Mapping[str, Stack], factor: float, seconds: float, seed: int
    ) -> dict[str, Hold]:
        """Hold a load factor with one side after another, the others standing still."""
        found = {}
        for name, stack in stacks.items():
            async with self._awake(stack):
                load = MixedLoad(stack, self._pieces, self._shape)
                found[name] = await load.hold(factor, seconds, seed)
        return found

    async def _start(
        self, stack: contextlib.AsyncExitStack, starts: Mapping[str, Start]
    ) -> dict[str, Stack]:
        """Start every side, ask for its recall, and stop it; a rival that is not set up is left out."""
        found = dict[str, Stack]()
        for place, (name, start) in enumerate(starts.items()):
            try:
                each = await stack.enter_async_context(start())
            except (FileNotFoundError, MeshError) as error:
                if place == 0:
                    raise
                self.kept.absent[name] = str(error)[-300:]
                continue
            found[name] = each
            self.kept.absent.pop(name, None)
            stack.callback(proc.send_trees, each.pids, signal.SIGCONT)
            self.kept.recall[name] = await self._recall(each)
            proc.send_trees(each.pids, signal.SIGSTOP)
        return found

    async def _recall(self, stack: Stack) -> float:
        asked = self._pieces.queries[:ASKED_FOR_RECALL]
        names = [await stack.search(query, self._shape.k) for query in asked]
        found = [[int(name.rpartition("-")[2]) for name in each] for each in names]
        return vectors.recall(found, self._pieces.truth[: len(asked)])

    @contextlib.asynccontextmanager
    async def _awake(self, stack: Stack) -> AsyncIterator[None]:
        """Let a side run until the block ends."""
        proc.send_trees(stack.pids, signal.SIGCONT)
        try:
            await self._wake(stack)
            yield
            await asyncio.sleep(SETTLE_S)
        finally:
            proc.send_trees(stack.pids, signal.SIGSTOP)

    async def _wake(self, stack: Stack) -> None:
        """Return once every kind is answered: a product that stood still must first find its workers again."""
        load = MixedLoad(stack, self._pieces, self._shape)
        limit = time.monotonic() + WAKE_S
        for ask in load.once():
            while not await _answered(ask) and time.monotonic() < limit:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def _answered(ask: Callable[[], Awaitable[object]]) -> bool:
    try:
        async with asyncio.timeout(WAKE_S):
            await ask()
    except (StackError, BatchError, TimeoutError):
        return False
    return True


def worst(counts: Mapping[str, Counted]) -> float:
    """Return the lowest share of any kind that met its objective; a kind that nobody asked for met it."""
    return min((each.met / each.asked for each in counts.values() if each.asked), default=1.0)


def _climbing(found: FactorRound, ladder: Ladder) -> list[str]:
    """Return the sides for which a factor was not too much."""
    return [
        name
        for name, hold in found.sides.items()
        if worst(hold.counts(ladder.warm_s)) >= ladder.over
    ]


def ended_rounds(rounds: Sequence[FactorRound], ladder: Ladder) -> list[FactorRound]:
    """Return the steps of the rounds that went to the end of the ladder, or until all sides had too much.

    A round that was left before would say that its sides carried no more than its last factor.
    """
    last = dict[int, FactorRound]()
    for each in sorted(rounds, key=lambda each: each.factor):
        last[each.round] = each
    ended = {
        number
        for number, each in last.items()
        if each.factor == ladder.factors[-1] or not _climbing(each, ladder)
    }
    return [each for each in rounds if each.round in ended]


def joined(holds: Sequence[Mapping[str, Counted]]) -> dict[str, Counted]:
    """Return the sums of several holds by kind."""
    return {
        kind: Counted(*(sum(each[kind][at] for each in holds) for at in (0, 1))) for kind in KINDS
    }


def capacity(shares: Mapping[float, float], level: float) -> float:
    """Return the load factor up to which at least `level` of the worst kind met its objective.

    Between the last factor that holds the level and the next one the share is interpolated; nothing is asked of an
    idle machine, so at 0 the share is 1. The highest factor measured if all hold it.
    """
    before, share = 0.0, 1.0
    for factor in sorted(shares):
        if shares[factor] < level:
            return before + (factor - before) * (share - level) / (share - shares[factor])
        before, share = factor, shares[factor]
    return before


class LoadStep(NamedTuple):
    """One side's counts at one load factor of one round; `still` unless the machine's speed moved meanwhile."""

    counts: Mapping[str, Counted]
    still: bool = True


def steps(rounds: Sequence[FactorRound], side: str, warm_s: float) -> list[dict[float, LoadStep]]:
    """Return what a side did in each round, by load factor."""
    found: dict[int, dict[float, LoadStep]] = {}
    for each in rounds:
        if side in each.sides:
            step = LoadStep(each.sides[side].counts(warm_s), each.still)
            found.setdefault(each.round, {})[each.factor] = step
    return list(found.values())


def shares_of(rounds: Sequence[Mapping[float, LoadStep]]) -> dict[float, float]:
    """Return the worst kind's share by load factor, over all rounds; 0 where a round did not climb so far.

    Of a factor only the rounds count during which the machine's speed did not move, unless it always did. A climb that
    ended in a step during which the speed moved says nothing of higher factors.
    """
    found = {}
    for factor in sorted({factor for each in rounds for factor in each}):
        reached = [each[factor] for each in rounds if factor in each]
        still = [step.counts for step in reached if step.still]
        summed = joined(still or [step.counts for step in reached])
        below = any(max(each) < factor and each[max(each)].still for each in rounds)
        found[factor] = 0.0 if below else worst(summed)
    return found
