"""Generation with retrieval at an interval: in turn with it, or with the next retrieval beside it (PipeRAG, 5.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from common.clock import SYSTEM, Clock
from engine.models.retro.database import Neighbour, Retrieve, values
from engine.models.retro.decoding import RetroDecoder
from engine.models.retro.network import RetroNetwork

Choose = Callable[[Tensor], int]


class WindowRetrieval(NamedTuple):
    """One retrieval of a generation.

    Its neighbours took effect before token `token` of the text (the prompt's tokens included); its query ended `stale`
    tokens earlier. `took_s` is the retrieval's own time, `waited_s` how long generation stood still for it, both in
    seconds; `encoded_s` is the time in which its neighbours were encoded.
    """

    token: int
    stale: int
    took_s: float
    waited_s: float
    encoded_s: float
    neighbours: Sequence[Neighbour]


@dataclass(slots=True)
class GeneratedText:
    """The tokens generated, the prompt's left out, and the retrievals made for them, in order."""

    tokens: list[int] = field(default_factory=list)
    retrievals: list[WindowRetrieval] = field(default_factory=list)


class _Answer(NamedTuple):
    neighbours: Sequence[Neighbour]
    took_s: float


def greedy(logits: Tensor) -> int:
    """Return the most likely token of `logits` [vocabulary]."""
    return int(logits.argmax())


class RetroGenerator:
    """Generates with a network; holds no state between two texts, so threads may share it."""

    def __init__(self, network: RetroNetwork, clock: Clock = SYSTEM) -> None:
        self._network = network
        self._clock = clock

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        retrieve: Retrieve | None,
        interval: int = 64,
        stale: int | None = None,
        *,
        pipelined: bool = True,
        choose: Choose = greedy,
    ) -> GeneratedText:
        """Return `tokens` tokens after `prompt` (at least one token), with a retrieval at its end and every `interval`.

        `retrieve` gets the last tokens of a text, a chunk at most, and returns neighbours, best first. The query of a
        retrieval ends `stale` tokens (0 to `interval`) before the place where it takes effect, and what it finds is
        shifted by as many; the first query is not stale. None is a whole interval if `pipelined`, else 0. If
        `pipelined`, a retrieval runs in a thread from the moment its query is known; otherwise generation waits for all
        of it. Both give the same text at the same staleness. Without `retrieve` the network generates alone.
        """
        if stale is None:
            stale = interval if pipelined else 0
        if not 0 <= stale <= interval or not prompt:
            raise ValueError(
                f"staleness {stale} at interval {interval} after {len(prompt)} tokens: "
                "expected 0 to the interval, and a prompt"
            )
        with ThreadPoolExecutor(1) if pipelined and retrieve else nullcontext() as pool:
            course = _Course(self._network, self._clock, list(prompt), retrieve, stale, pool)
            for made in range(tokens):
                if made % interval == 0:
                    course.renew()
                if (made + stale) % interval == 0 and made + stale < tokens and stale:
                    course.ask()
                course.step(choose)
        return course.found


class _Course:
    """One text under way: its tokens, its decoder, and the retrievals asked for and not yet used."""

    def __init__(
        self,
        network: RetroNetwork,
        clock: Clock,
        text: list[int],
        retrieve: Retrieve | None,
        stale: int,
        pool: ThreadPoolExecutor | None,
    ) -> None:
        self._config = network.config
        self._clock, self._retrieve, self._pool, self._stale = clock, retrieve, pool, stale
        self._text = text
        self._decoder = RetroDecoder(network)
        for begin in range(0, len(text) - 1, self._config.window):
            end = min(begin + self._config.window, len(text) - 1)
            self._decoder.read(torch.tensor([text[begin:end]]))
        self._asked: deque[Future[_Answer] | list[int]] = deque()
        self.found = GeneratedText()

    def ask(self) -> None:
        """Ask by the last tokens of the text: at once in the pool, or when the answer is needed."""
        window = self._text[-self._config.chunk :]
        pool = self._pool
        self._asked.append(window if pool is None else pool.submit(self._answer, window))

    def renew(self) -> None:
        """Wait for the oldest retrieval asked for (for a new one if there is none) and put it into effect."""
        if self._retrieve is None:
            return
        stale = self._stale if self._asked else 0
        began = self._clock.perf_s()
        if not self._asked:
            self.ask()
        asked = self._asked.popleft()
        answer = asked.result() if isinstance(asked, Future) else self._answer(asked)
        waited = self._clock.perf_s()
        rows = values(answer.neighbours, self._config.neighbours, self._config.value, stale)
        self._decoder.attend_to(torch.tensor([rows]))
        encoded = self._clock.perf_s() - waited
        self.found.retrievals.append(
            WindowRetrieval(
                len(self._text), stale, answer.took_s, waited - began, encoded, answer.neighbours
            )
        )

    def step(self, choose: Choose) -> None:
        """Read the text's last token and append the next one."""
        logits = self._decoder.read(torch.tensor([self._text[-1:]]))
        self._text.append(choose(logits[0, -1]))
        self.found.tokens.append(self._text[-1])

    def _answer(self, window: list[int]) -> _Answer:
        assert self._retrieve is not None
        began = self._clock.perf_s()
        found = self._retrieve(window)
        return _Answer(found, self._clock.perf_s() - began)
