"""WindVE on a real accelerator and the cores beside it: depths, the gain in concurrency, query lengths and core counts.

    python -m bench.gpu.windve --device cuda --json out.json     # on the machine with the accelerator
    python -m bench.gpu.windve --device cpu --tiny --json out.json

Random weights made here. The accelerator's encoder and the CPU's are processes of their own, probed in closed rounds by
the estimator that workers use at their start. Resumable: a cell that is in the JSON already is not measured again.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing as mp
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.gpu.embeddings import make_model
from bench.gpu.record import Record, arguments
from common.cost.estimate import estimate, tune, tune_beside
from engine.models.encoders.encoder import Encoder

LENGTH = 75
LENGTHS = (75, 256, 500)
OBJECTIVES = (1.0, 2.0)
MOST = 20_000


def serve(pipe: Connection, directory: str, device: str, cores: Sequence[int]) -> None:
    """Be one device: answer each list of (queries, tokens) once all are embedded, until the pipe closes."""
    if cores:
        os.sched_setaffinity(0, set(cores))
    encoder = Encoder.load(directory, device=device, threads=len(cores))
    rng = random.Random(1)
    pipe.send("ready")
    try:
        while True:
            queries, tokens = pipe.recv()
            rows = [[rng.randrange(1, 1000) for _ in range(tokens)] for _ in range(queries)]
            encoder.encode(rows)
            pipe.send(queries)
    except EOFError:
        return


class EncoderDevice:
    """A process that embeds; `ask` and `wait` are its queue."""

    def __init__(self, directory: str, device: str, cores: Sequence[int]) -> None:
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=serve, args=(other, directory, device, cores), daemon=True
        )
        self._process.start()
        other.close()
        self._pipe.recv()

    def ask(self, queries: int, tokens: int) -> None:
        """Send so many queries at once."""
        self._pipe.send((queries, tokens))

    def wait(self) -> None:
        """Return when the last is answered."""
        self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


class DevicePair:
    """The accelerator and, if it has cores, the CPU beside it."""

    def __init__(self, directory: str, device: str, cores: Sequence[int]) -> None:
        spare = sorted(os.sched_getaffinity(0) - set(cores))
        self.accelerator = EncoderDevice(
            directory, device, spare if device == "cpu" and spare else ()
        )
        self.cpu = EncoderDevice(directory, "cpu", cores)

    def close(self) -> None:
        """End both."""
        self.accelerator.close()
        self.cpu.close()

    async def alone(self, device: EncoderDevice, tokens: int, queries: int) -> float:
        """Return the seconds of one closed round on one device."""
        began = time.perf_counter()
        device.ask(queries, tokens)
        await asyncio.to_thread(device.wait)
        return time.perf_counter() - began

    async def both(self, tokens: int, accelerator: int, cpu: int) -> tuple[float, float]:
        """Return the seconds of one closed round on both at once."""
        there = self.alone(self.accelerator, tokens, accelerator)
        return tuple(await asyncio.gather(there, self.alone(self.cpu, tokens, cpu)))  # type: ignore[return-value]

    async def measure(self, slo_s: float, tokens: int) -> dict[str, Any]:
        """Return both devices' lines and depths, and the gain in concurrency."""
        found: dict[str, Any] = {}
        for name, device in (("accelerator", self.accelerator), ("cpu", self.cpu)):
            probe = functools.partial(self.alone, device, tokens)
            line = await estimate(probe, slo_s, most=MOST)
            depth = await tune(probe, slo_s, line.depth, most=MOST) if line.depth else 0
            found[name] = line._asdict() | {"tuned": depth}
        deep = found["accelerator"]["tuned"]
        beside = functools.partial(self.both, tokens)
        helps = found["cpu"]["tuned"]
        if deep and helps:
            helps = await tune_beside(beside, slo_s, deep, helps, most=MOST)
        found["together"] = helps
        found["gain"] = helps / deep if deep else 0.0
        return found


@contextmanager
def running(directory: str, device: str, cores: Sequence[int]) -> Iterator[DevicePair]:
    """Start both devices and end them."""
    pair = DevicePair(directory, device, cores)
    try:
        yield pair
    finally:
        pair.close()


def measure(record: Record, directory: str, shape: str, device: str, *, tiny: bool) -> None:
    """Fill in one shape's cells: both objectives, then lengths and core counts at 2 s."""
    allowed = sorted(os.sched_getaffinity(0))
    # The low cores stay with the services and the accelerator's driver (section IV.C of the paper).
    most = max(1, len(allowed) - 2)
    objectives = (0.02,) if tiny else OBJECTIVES
    counts = sorted({1, most} if tiny else {2, 4, 8, most} & set(range(1, most + 1)))
    for cores in reversed(counts):
        cells = {f"{shape}/{slo_s:g}s/{LENGTH}/{cores}": (slo_s, LENGTH) for slo_s in objectives}
        if cores == most:
            longer = LENGTHS[1:2] if tiny else LENGTHS[1:]
            cells |= {
                f"{shape}/{slo_s:g}s/{n}/{cores}": (slo_s, n)
                for slo_s in objectives
                for n in longer
            }
        if not record.wants(*cells):
            continue
        with running(directory, device, allowed[-cores:]) as pair:
            for name, (slo_s, tokens) in cells.items():
                record.fill(name, lambda s=slo_s, n=tokens: asyncio.run(pair.measure(s, n)))  # type: ignore[misc]


def main(words: Sequence[str] | None = None) -> int:
    """Measure every cell that is left; 3 if some still are."""
    args = arguments(__doc__, words)
    record = Record(args.json, args.device, args.minutes)
    for shape in ("tiny",) if args.tiny else ("large", "minilm"):  # the paper's first
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory), shape)
            measure(record, directory, shape, args.device, tiny=args.tiny)
    for name, cell in record.cells.items():
        deep, gain = cell["accelerator"]["tuned"], 100 * cell["gain"]
        print(
            f"{name:24} {deep:6d} + {cell['together']:4d}  gain {gain:5.1f} %  r2 {cell['accelerator']['r2']:.4f}"
        )
    return record.status()


if __name__ == "__main__":
    raise SystemExit(main())
