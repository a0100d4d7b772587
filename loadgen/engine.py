"""The encoder alone in a process of its own: what the mesh is compared with, fed by lines of JSON.

`python -m loadgen.engine` answers each {"texts": [[ids]], "repeat": n} with {"seconds": s}; the process shares nothing
with the load generator, so neither side pays for the other's threads.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from loadgen.mesh import ROOT


def main() -> None:
    """Load the default encoder as a worker does, then answer until standard input ends."""
    from common.ml.encoder import Encoder  # noqa: PLC0415 - only in the engine's own process

    encoder = Encoder.load("", device="cpu", cache=Path(sys.argv[1]) / "cache" / "precision.json")
    encoder.encode([[101, 2023, 102]] * 32)
    _answer({"dtype": encoder.dtype, "dimension": encoder.dimension})
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line)
        began = time.perf_counter()
        for batch in asked["batches"]:
            encoder.encode(batch)
        _answer({"seconds": time.perf_counter() - began})


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


class Engine:
    """The other end: use as `async with Engine(data_dir) as engine`; `encode` returns the seconds it took."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._process: asyncio.subprocess.Process | None = None
        self.about: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadgen.engine", str(self._data_dir), cwd=ROOT,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
        )  # fmt: skip
        self.about = await self._line()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    async def encode(self, batches: list[list[list[int]]]) -> float:
        """Encode batches of token lists one after the other; return the seconds inside the engine."""
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("Engine is used outside its `async with`")
        self._process.stdin.write(msgspec.json.encode({"batches": batches}) + b"\n")
        await self._process.stdin.drain()
        seconds: float = (await self._line())["seconds"]
        return seconds

    async def _line(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 120)
        if not line:
            raise RuntimeError("the engine's process has ended")
        found: dict[str, Any] = msgspec.json.decode(line)
        return found


if __name__ == "__main__":
    main()
