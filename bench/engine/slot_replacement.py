"""Answers whose passages are replaced as they are written: in the running sequence, or by a new prompt each time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bench.engine.driver import Driver
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.scheduler import StepLimits
from engine.decoder.sequence import TokenSequence

# The running sequence gets another prompt; it is dropped, and prompt and answer come as a new one, which finds the
# pages of an equal prefix, or none.
How = Literal["replaced", "read anew, pages found", "read anew"]
HOWS: tuple[How, ...] = ("replaced", "read anew, pages found", "read anew")
_STEP = StepLimits(512, 1)


class ReplacedAnswer(NamedTuple):
    """An answer's tokens, seconds until its first one and in all; of each replacement tokens computed, and seconds.

    A replacement takes until the next token is there. Nothing is searched for: its passages are there at once.
    """

    tokens: list[int]
    first_s: float
    seconds: float
    computed: list[int]
    replaced_s: list[float]


class SlotAnswers:
    """Writes answers greedily with one executor, each from no page of another one."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._driver = Driver(executor, _STEP)
        self._scopes = 0

    def write(self, prompts: Sequence[Sequence[int]], interval: int, how: How) -> ReplacedAnswer:
        """Write `interval` tokens behind each prompt in turn, and all those written before."""
        driver, scope, total = self._driver, self._scope(), interval * len(prompts)
        said, computed, replaced_s = list[int](), list[int](), list[float]()
        began_s = time.perf_counter()
        sequence = driver.add(prompts[0], total, scope)
        first_s = self._next(sequence) - began_s
        for number, prompt in enumerate(prompts, 1):
            if number > 1:
                asked_s = time.perf_counter()
                if how == "replaced":
                    computed.append(driver.scheduler.rewrite(sequence, prompt))
                else:
                    driver.scheduler.drop([sequence])
                    scope = scope if how == "read anew, pages found" else self._scope()
                    sequence = driver.add([*prompt, *said], total - len(said), scope)
                replaced_s.append(self._next(sequence) - asked_s)
                if how != "replaced":
                    computed.append(len(sequence.prompt) - sequence.cached)
            while sequence.length < len(prompt) + number * interval:
                driver.step()
            said = sequence.tokens()[len(prompt) :]
        seconds = driver.drawn_s[sequence.order][-1] - began_s
        return ReplacedAnswer(said, first_s, seconds, computed, replaced_s)

    def _next(self, sequence: TokenSequence) -> float:
        """Step until the sequence has one token more; return when it was drawn."""
        had = sequence.length
        while sequence.length == had:
            self._driver.step()
        return self._driver.drawn_s[sequence.order][-1]

    def _scope(self) -> str:
        self._scopes += 1
        return str(self._scopes)
