"""The engine beside llama.cpp: the same weights, bits, threads and work, each in a process of its own, in pairs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bench import ROOT
from bench.document import BenchOptions, Body, Rival
from bench.gpu import shapes
from bench.mesh import proc
from bench.pairs import Blocks, Measured, Side, measure_sides
from bench.rivals import environments, gguf_file
from common.devices import detect

RIVAL = "llama.cpp"
VERSION = "llama-cpp-python 0.3.36"
SHAPE = "llama-1b"  # reference shape L
SHAPES = {"L": SHAPE, "M": "llama-85m"}
KINDS = gguf_file.KINDS
MOST_STREAMS = 32
PAUSE_S = 0.3  # the other side's threads may spin for so long after its work


class Model:
    """One engine's process; `ask` sends it a piece of work and returns the seconds."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None
        self.started_s = 0.0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, cwd=ROOT, preexec_fn=proc.die_with_parent, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.started_s = float((await self._line(600))["started_s"])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def ask(self, what: str, **work: int) -> float:
        """Return the seconds that a piece of work took inside the engine."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({what: work}).encode() + b"\n")
        await self._process.stdin.drain()
        return float((await self._line(900))["seconds"])

    def rss_bytes(self) -> int:
        """Return what the process holds in memory."""
        assert self._process is not None
        return proc.tree_rss_bytes(self._process.pid)

    def side(self, what: str, **work: int) -> Side:
        """Return the same piece of work as one side of pairs."""

        async def run(_number: int) -> Measured:
            await asyncio.sleep(PAUSE_S)
            return Measured(await self.ask(what, **work))

        return run

    async def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        if not line:
            raise RuntimeError(f"{self._argv[0]}: the engine's process has ended")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.asynccontextmanager
async def both(
    kind: str, options: BenchOptions, *, shape: str = SHAPE, rival: str = RIVAL
) -> AsyncIterator[list[Model]]:
    """Start our engine with weights of one kind, and the rival with the same ones if it is set up."""
    directory = options.setup_dir / "models" / shape
    shapes.write(directory, shapes.SHAPES[shape], "cpu")
    threads = str(detect().usable_cores)
    ours = Model(
        [sys.executable, "-m", "bench.engine.decoder_process", str(directory), kind, threads]
    )
    python = environments.python(rival, options.setup_dir)
    async with contextlib.AsyncExitStack() as stack:
        found = [await stack.enter_async_context(ours)]
        if python is not None:
            if rival == RIVAL:
                words = await asyncio.to_thread(_llama, python, directory, kind, threads)
            else:
                script = ROOT / "bench" / "rivals" / "other_engines.py"
                words = [str(python), "-P", str(script), rival, str(directory), kind, threads]
            found.append(await stack.enter_async_context(Model(words)))
        yield found


def _llama(python: Path, directory: Path, kind: str, threads: str) -> list[str]:
    """Return what starts llama.cpp, with its file written."""
    script = ROOT / "bench" / "rivals" / "llama_cpp_engine.py"
    file = gguf_file.of(directory, kind, python)
    return [str(python), str(script), str(file), threads, str(MOST_STREAMS)]


def llama(measured: bool) -> Rival:
    """Return what is said of llama.cpp."""
    setting = {"threads": detect().usable_cores, "n_ubatch": 512, "weights": list(KINDS.values())}
    return Rival(RIVAL, VERSION, [setting], setting, measured)


async def compare(models: Sequence[Model], pairs: int, what: str, **work: int) -> Blocks:
    """Measure one piece of work on both sides; alone, on ours only (its seconds then stand on either side)."""
    sides = [model.side(what, **work) for model in models]
    return await measure_sides(sides[0], sides[-1], pairs=pairs, block=max(2, pairs // 6))


def run(body: Body, options: BenchOptions, measure: Any) -> Body:
    """Run an async measurement of a row that needs the rival."""
    asyncio.run(measure(body, options))
    there = environments.python(RIVAL, options.setup_dir) is not None
    body.rivals.append(llama(there))
    body.notes.append(
        "L: hidden 2048, 16 layers, 32 heads on 8, inner 8192, vocabulary 32,000; M: hidden 768, 12 layers, 12 heads "
        "on 4, inner 2048, vocabulary 8,192; random weights. "
        "int8 and int4: 64 inputs share an fp32 scale here, 32 an fp16 one in Q8_0 and Q4_0; either way 8.5 and 4.5 "
        "bits a weight. Both take the likeliest token of every stream after every step."
    )
    return body


def told(ratio: Mapping[str, float]) -> str:
    """Return a ratio with its interval, as tables show it."""
    return f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def weight_bytes(kind: str, config: Mapping[str, int]) -> float:
    """Return the bytes of all weights that one token reads."""
    hidden, inner, layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    wide = hidden + 2 * hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    matrices = layers * hidden * (wide + hidden + 3 * inner) + hidden * config["vocab_size"]
    return matrices * {"bf16": 16, "int8": 8.5, "int4": 4.5}[kind] / 8
