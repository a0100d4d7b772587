"""The decoder in a process of its own, fed with lines of JSON as its rivals are.

`python -m bench.engine.decoder_process MODEL KIND THREADS` answers {"decode": {"streams", "context", "steps"}} and
{"prefill": {"tokens"}} with {"seconds"}; the runner computes and draws as in a worker, pages are laid out here.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence

import torch

from common import log
from common.config import WorkerConfig
from common.pages.identity import PAGE
from common.types.generation import SamplingParams
from engine.decoder.executor.interface import SamplingRequest, SequenceInput
from engine.decoder.executor.torch_executor import TorchExecutor

STEP = 512  # rows a step computes at most, as a worker's default is
_GREEDY = SamplingParams(temperature=0.0)


class LoadedGenerator:
    """A loaded generator whose sequences lie one after another in its pages."""

    def __init__(self, model: str, kind: str, threads: int) -> None:
        kv_bytes = 3 << 30
        self._runner = TorchExecutor.load(
            model, device="cpu", dtype=kind, threads=threads, kv_bytes=kv_bytes
        )
        self._filled: tuple[tuple[int, int], list[list[int]]] | None = None

    def _rows(
        self, number: int, room: int, first: int, tokens: Sequence[int], *, draw: bool
    ) -> SequenceInput:
        pages = list(range(number * room, (number + 1) * room))
        positions = list(range(first, first + len(tokens)))
        drawn = SamplingRequest(_GREEDY, 0, positions[-1] + 1, [], []) if draw else None
        return SequenceInput(
            list(tokens), positions, [pages] * len(self._runner.shape.windows), drawn
        )

    def _prompt(self, number: int, room: int, tokens: int, seed: int) -> list[int]:
        draw = random.Random(seed)
        text = [draw.randrange(self._runner.shape.vocabulary) for _ in range(tokens)]
        drawn = None
        for at in range(0, tokens, STEP):
            some, last = text[at : at + STEP], at + STEP >= tokens
            (drawn,) = self._runner.execute([self._rows(number, room, at, some, draw=last)])
        return [drawn.token] if drawn else []

    def _fill(self, streams: int, context: int, room: int) -> list[list[int]]:
        """Begin sequences of random tokens: one is computed, and its pages are copied for the others."""
        first = self._prompt(0, room, context, 1)
        with torch.inference_mode():
            for pool in self._runner._pools:
                for number in range(1, streams):
                    pool.data[number * room : (number + 1) * room] = pool.data[:room]
        return [first] * streams

    def decode(self, streams: int, context: int, steps: int) -> float:
        """Return the seconds of `steps` greedy steps of all streams, from `context` tokens on.

        The context is computed once; later calls go on from it anew.
        """
        room = (context + steps) // PAGE + 1
        if self._filled is None or self._filled[0] != (streams, context):
            self._filled = (streams, context), self._fill(streams, context, room)
        tokens = self._filled[1]
        began = time.perf_counter()
        for step in range(steps):
            batch = [
                self._rows(n, room, context + step, tokens[n], draw=True) for n in range(streams)
            ]
            tokens = [[drawn.token] for drawn in self._runner.execute(batch) if drawn]
        return time.perf_counter() - began

    def prefill(self, tokens: int) -> float:
        """Return the seconds until the first token after a prompt."""
        self._filled = None
        began = time.perf_counter()
        self._prompt(0, tokens // PAGE + 1, tokens, 1)
        return time.perf_counter() - began


def main() -> None:
    """Load what the command line names, then answer until standard input ends."""
    log.setup("engine", WorkerConfig())
    began = time.perf_counter()
    model = LoadedGenerator(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    _answer({"started_s": time.perf_counter() - began})
    for line in sys.stdin:
        ((what, arguments),) = json.loads(line).items()
        _answer({"seconds": getattr(model, what)(**arguments)})


def _answer(value: dict[str, float]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
