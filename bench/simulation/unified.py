"""Simulate prompts and answers in one step, and prompts in steps of their own (Pensieve, 3.6.7).

The engine's own scheduler plans every step; instead of a model, a step takes what a linear cost says. Figures are
therefore simulated ones: they compare the two ways of planning, and tell nothing of a machine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.workloads.conversations import Scale, Turn, conversations
from bench.workloads.turns import AskedTurn, Point, point
from common.pages.identity import PAGE, root_id
from engine.decoder.executor.interface import ModelShape
from engine.decoder.scheduler import ScheduledRows, Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence
from loadgen.arrivals import poisson

UNIFIED, PREFILL_FIRST = "unified", "prefill first"
# Tokens are a quarter of the paper's: of a turn, of the longest conversation, and of keys and values on the device.
SCALE = Scale(lengths=4, pauses=20, context=16384 // 4)
DEVICE_TOKENS = 52_224 // 4
VOCABULARY = 1000
SHAPE = ModelShape([None], [1], DEVICE_TOKENS // PAGE, SCALE.context, VOCABULARY)
BOUNDS = StepLimits(512, 64)  # as a worker has them if it is not told otherwise
WARM = 0.3  # of the seconds, which count for no figure
_ANSWER = 0  # every token of every answer


class Cost(NamedTuple):
    """Seconds of a step, and of each row of it, whatever the row sees."""

    step_s: float
    row_s: float


MODEL_M = Cost(6e-3, 0.55e-3)  # near what model M takes on two cores
# Near 13 billion parameters in 16 bits, the paper's: 26 GB read a step at 1.5 TB/s, 26 GFLOP a row at 260 TFLOP/s.
LARGE = Cost(18e-3, 0.1e-3)


@dataclass(slots=True)
class _Conversation:
    number: int
    turns: list[Turn]
    history: list[int]
    turn: int = 0


class TurnSimulation:
    """One rate of conversations a second, planned in one of the two ways; `asked` is by conversation and turn.

    Conversations begin in an open loop, each turn is sent a pause after the last answer, and what is open after
    `seconds` is left. The same seed begins the same conversations at the same moments whatever the way.
    """

    def __init__(
        self,
        rate: float,
        seconds: float,
        seed: int,
        cost: Cost = MODEL_M,
        *,
        prefill_first: bool,
    ) -> None:
        self.scheduler = Scheduler(SHAPE, BOUNDS)
        self.now_s = 0.0
        self.asked: dict[tuple[int, int], AskedTurn] = {}
        self._seconds, self._cost, self._prefill_first = seconds, cost, prefill_first
        self._arrivals = poisson(rate, random.Random(seed))
        self._some = conversations(SCALE, VOCABULARY, seed)
        self._due: list[tuple[float, int, _Conversation]] = []
        self._begun = self._sent = 0
        self._open: dict[int, tuple[_Conversation, AskedTurn]] = {}  # by the sequence's order
        self._begin()

    def step(self) -> list[ScheduledRows] | None:
        """Run the next step, or wait for the next turn; return what was computed, None if the seconds are over."""
        while self._due[0][0] <= self.now_s:
            self._send()
        parts = self._computed_now(self.scheduler.step(self._budget(), now_s=self.now_s))
        if parts:
            rows = sum(len(part.positions) for part in parts)
            self.now_s += self._cost.step_s + self._cost.row_s * rows
        else:
            self.now_s = self._due[0][0]
        if self.now_s >= self._seconds:
            return None
        for part in parts:
            self._commit(part)
        return parts

    def _budget(self) -> int:
        """Return the rows to plan: what is planned of who sits the step out is not to take room from prompts."""
        apart = sum(one.decodes for one in self.scheduler.running) if self._prefill_first else 0
        return BOUNDS.tokens + apart

    def _computed_now(self, parts: list[ScheduledRows]) -> list[ScheduledRows]:
        """Return what of a planned step is computed: prompts alone, if there are any with more than a row left.

        A part left out keeps the page it was given and is planned with it again. Nobody else finds that page, since it
        has no id before its rows are committed.
        """
        prompts = [part for part in parts if not part.sequence.decodes]
        return prompts if self._prefill_first and prompts else parts

    def _begin(self) -> None:
        """Let the next conversation that has a turn be due when it arrives."""
        at, turns = next(self._arrivals), next(self._some)
        while not turns:
            at, turns = next(self._arrivals), next(self._some)
        self._wait(_Conversation(self._begun, turns, []), at)
        self._begun += 1

    def _wait(self, conversation: _Conversation, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, conversation.number, conversation))

    def _send(self) -> None:
        """Send the turn that is due, and let the conversation after it be known if it was a first one."""
        due_s, number, conversation = heapq.heappop(self._due)
        turn = conversation.turns[conversation.turn]
        conversation.history += turn.tokens
        prompt = conversation.history
        asked = AskedTurn(due_s, conversation.turn, len(prompt), turn.wanted)
        self.asked[number, conversation.turn] = asked
        # A root of its own: no two conversations share a page, though answers are alike.
        root, most = root_id("0f", str(number)), len(prompt) + turn.wanted
        sequence = TokenSequence(str(number), 0, self._sent, prompt, root=root, most=most)
        self._open[self._sent] = conversation, asked
        self._sent += 1
        self.scheduler.add(sequence)
        if conversation.turn == 0:
            self._begin()

    def _commit(self, part: ScheduledRows) -> None:
        """A part was computed, and the step has ended."""
        sequence = part.sequence
        self.scheduler.commit(part, _ANSWER if part.draws else None)
        if not part.draws:
            return
        conversation, asked = self._open[sequence.order]
        asked.tokens += 1
        if asked.first_s is None:
            asked.first_s = self.now_s
        if sequence.length < sequence.most:
            return
        asked.done_s = self.now_s
        self.scheduler.drop([sequence])
        del self._open[sequence.order]
        conversation.history += sequence.output
        conversation.turn += 1
        if conversation.turn < len(conversation.turns):
            think_s = conversation.turns[conversation.turn].think_s
            self._wait(conversation, self.now_s + think_s)


def unified(
    rates: Sequence[float], seconds: float, seed: int, cost: Cost = MODEL_M
) -> dict[str, list[Point]]:
    """Return the points of both ways, of `rates` conversations a second for so many virtual seconds each."""
    found: dict[str, list[Point]] = {UNIFIED: [], PREFILL_FIRST: []}
    for rate in rates:
        for way, points in found.items():
            prefill_first = way == PREFILL_FIRST
            simulation = TurnSimulation(rate, seconds, seed, cost, prefill_first=prefill_first)
            while simulation.step() is not None:
                pass
            asked = list(simulation.asked.values())
            points.append(point(asked, rate, WARM * seconds, seconds))
    return found
