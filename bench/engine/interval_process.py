"""A generator that retrieves at intervals, in a process of its own on given cores, fed with lines of JSON.

`python -m bench.engine.interval_process MODEL KIND CORES SOCKET` (cores as 0,1; the socket of `search_process`) answers
{"alone": {...}}, {"searches": {...}} and {"write": {...}} as `IntervalAnswers` does. The kind is that of a chat model's
weights, or `retro`.

A chat model gets what was retrieved as a passage in front of its question, so each chunk computes passage, question and
what was written anew: pages are found again only after an equal prefix. A RETRO model attends to what was retrieved.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench.engine.driver import Driver
from bench.engine.search_process import SearchLink
from common import log
from common.config import WorkerConfig
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.scheduler import StepLimits
from engine.models.retro.database import Neighbour
from engine.models.retro.files import load_retro
from engine.models.retro.generation import RetroGenerator

WINDOW = 64  # tokens of a query, and of a passage
HEAD, QUESTION = 32, 32
RETRO = "retro"
_STEP = StepLimits(512, 1)
Retrieve = Callable[[Sequence[int]], int]  # from the last tokens to the row found


class IntervalWriter(Protocol):
    """Writes answers of so many chunks of `interval` tokens, each from what was retrieved for it.

    With `pipelined` the retrieval of a chunk runs beside the chunk before it, by the text up to there; else it comes
    between the two. The first one is waited for.
    """

    def write(
        self, seed: int, chunks: int, interval: int, retrieve: Retrieve, *, pipelined: bool
    ) -> None:
        """Write one answer to a question drawn by the seed."""


class PassageWriter:
    """Answers of a chat model; a passage stands in front of the question."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._driver, self._vocabulary = Driver(executor, _STEP), executor.shape.vocabulary
        self._answers = 0

    def write(
        self, seed: int, chunks: int, interval: int, retrieve: Retrieve, *, pipelined: bool
    ) -> None:
        """Write one answer."""
        draw = random.Random(seed)
        head, question = (self._random(draw, count) for count in (HEAD, QUESTION))
        text = list(question)
        self._answers += 1
        scope = str(self._answers)  # no page of another answer is found again
        with ThreadPoolExecutor(1) as pool:
            row = retrieve(text[-WINDOW:])
            for number in range(1, chunks + 1):
                ahead = (
                    pool.submit(retrieve, text[-WINDOW:]) if pipelined and number < chunks else None
                )
                passage = self._random(random.Random(row), WINDOW)
                sequence = self._driver.add([*head, *passage, *text], interval, scope)
                self._driver.run()
                text += sequence.output
                if number < chunks:
                    row = retrieve(text[-WINDOW:]) if ahead is None else ahead.result()

    def _random(self, draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(3, self._vocabulary) for _ in range(count)]


class RetroWriter:
    """Answers of a RETRO model, which attends to what was retrieved."""

    def __init__(self, generator: RetroGenerator, vocabulary: int, neighbours: int) -> None:
        self._generator, self._vocabulary, self._neighbours = generator, vocabulary, neighbours

    def write(
        self, seed: int, chunks: int, interval: int, retrieve: Retrieve, *, pipelined: bool
    ) -> None:
        """Write one answer."""
        draw = np.random.default_rng(seed)
        prompt = draw.integers(3, self._vocabulary, QUESTION).tolist()

        def found(window: Sequence[int]) -> list[Neighbour]:
            rows = np.random.default_rng(retrieve(window))
            documents = rows.integers(3, self._vocabulary, (self._neighbours, 4 * WINDOW))
            return [Neighbour(each, 0) for each in documents]

        self._generator.generate(prompt, chunks * interval, found, interval, pipelined=pipelined)


class IntervalAnswers:
    """One writer, and the times of its answers."""

    def __init__(self, writer: IntervalWriter, link: SearchLink) -> None:
        self._writer, self._link = writer, link

    def alone(self, *, seed: int, chunks: int, interval: int) -> dict[str, list[float]]:
        """Return the seconds of each chunk of an answer whose retrievals take no time."""
        asked_s = list[float]()

        def at_once(_: Sequence[int]) -> int:
            asked_s.append(time.perf_counter())
            return seed

        self._writer.write(seed, chunks, interval, at_once, pipelined=False)
        ends_s = [*asked_s[1:], time.perf_counter()]
        return {"chunks_s": [end - start for start, end in zip(asked_s, ends_s, strict=True)]}

    def searches(self, *, seed: int, count: int, how: Mapping[str, Any]) -> dict[str, Any]:
        """Return the seconds of so many retrievals with nothing beside them, and how many lists there are."""
        draw, taken_s = random.Random(seed), list[float]()
        for _ in range(count):
            tokens = [draw.randrange(1 << 20) for _ in range(WINDOW)]
            began_s = time.perf_counter()
            self._link.row(tokens, how)
            taken_s.append(time.perf_counter() - began_s)
        return {"searches_s": taken_s, "lists": self._link.lists}

    def write(
        self,
        *,
        seed: int,
        chunks: int,
        interval: int,
        pipelined: bool,
        how: Mapping[str, Any],
        waits_s: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return the seconds of an answer, and those of each of its retrievals; `waits_s` are replayed in turn."""
        taken_s = list[float]()

        def searched(tokens: Sequence[int]) -> int:
            replayed = {"wait_s": waits_s[len(taken_s) % len(waits_s)]} if waits_s else how
            began_s = time.perf_counter()
            row = self._link.row(tokens, replayed)
            taken_s.append(time.perf_counter() - began_s)
            return row

        began_s = time.perf_counter()
        self._writer.write(seed, chunks, interval, searched, pipelined=pipelined)
        return {"seconds": time.perf_counter() - began_s, "searches_s": taken_s}


def writer_of(model: str, kind: str, threads: int) -> IntervalWriter:
    """Load what a model and a kind name."""
    if kind == RETRO:
        torch.set_num_threads(threads)
        network = load_retro(Path(model))
        config = network.config
        return RetroWriter(RetroGenerator(network), config.vocabulary, config.neighbours)
    executor = TorchExecutor.load(
        model, device="cpu", dtype=kind, threads=threads, kv_bytes=128 << 20
    )
    return PassageWriter(executor)


def main() -> None:
    """Load what the command line names, then answer until standard input ends."""
    log.setup("engine", WorkerConfig())
    began_s = time.perf_counter()
    model, kind, cores, place = sys.argv[1:]
    own = [int(each) for each in cores.split(",")]
    os.sched_setaffinity(0, own)
    with SearchLink(place) as link:
        answers = IntervalAnswers(writer_of(model, kind, len(own)), link)
        _answer({"started_s": time.perf_counter() - began_s})
        for line in sys.stdin:
            ((what, arguments),) = json.loads(line).items()
            _answer(getattr(answers, what)(**arguments))


def _answer(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
