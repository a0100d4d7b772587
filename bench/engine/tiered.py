"""The engine with page tiers and a Redis for pages, without a bus: turns of conversations, one at a time."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from bench.engine.driver import GREEDY
from bench.mesh import proc
from cli import embedded
from common.clock import SystemClock
from common.config import SupervisorConfig, WorkerConfig
from common.pages.identity import root_id
from common.pages.store import PageKey, PageStore
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.kv.offload import CachePolicy
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.decoder.sequence import TokenSequence
from engine.device import DeviceQueue

START_S, PUT_S = 10.0, 30.0
_WAIT_S = 1.0


class PagesRedis:
    """A Redis of pages that ends with its context; it can be stopped in its tracks and killed."""

    def __init__(self, maxmemory_bytes: int) -> None:
        self._room = maxmemory_bytes

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp())
        socket = self.folder / "pages.sock"
        self.url = f"unix://{socket}"
        argv = [embedded.binary(SupervisorConfig()), "--port", "0", "--unixsocket", socket]
        argv += ["--save", "", "--maxmemory", str(self._room), "--dir", self.folder]
        self._process = subprocess.Popen(
            [str(word) for word in argv],
            stdout=subprocess.DEVNULL,
            preexec_fn=proc.die_with_parent,  # noqa: PLW1509 - nothing else runs yet
        )
        give_up = time.monotonic() + START_S
        while not socket.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f"the pages Redis did not start within {START_S:g} s")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, number)


class Turn(NamedTuple):
    """A turn's seconds to its first token, the tokens, and how many of the prompt's were found."""

    first_s: float
    tokens: list[int]
    found: int


class Tiered:
    """An executor with all its tiers; the pages of a turn can be forgotten in some of them."""

    def __init__(
        self,
        runner: TorchExecutor,
        config: WorkerConfig,
        *,
        pace: DecoderCapacity | None = None,
    ) -> None:
        """`pace` is another engine's of the same model; None: it is measured."""
        self.runner, self.config = runner, config
        self.pace = pace or DecoderCapacity(
            measure(runner, config.step_tokens, config.max_running),
            slo_s=config.chat_slo_s,
            context=runner.shape.context,
        )
        self.store = PageStore.of(config, SystemClock())
        self._device = DeviceQueue()
        self.engine = DecoderEngine(
            runner,
            self.pace,
            StepLimits(config.step_tokens, config.max_running),
            self._device,
            cache=CachePolicy(config.eviction, config.page_publish, config.pages_ttl_s),
            store=self.store,
        )
        self.tiering, self.tiers = self.engine.offload, self.engine.offload.tiers
        self._vocabulary = Vocabulary(runner.tokenizer_json())
        self._order = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.tiering.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._device.close()

    async def turn(self, prompt: Sequence[int], new: int = 1) -> Turn:
        """Generate; RuntimeError if a step fails."""
        request = GenerationRequest(
            str(self._order),
            [prompt],
            StopRules(new),
            root_id(self.runner.fingerprint, ""),
            sampling=GREEDY,
        )
        generation = Generation(request, self._vocabulary, self._order)
        self._order += 1
        (choice,) = generation.choices
        began, first_s = time.perf_counter(), 0.0
        self.engine.add(generation)
        while not generation.over:
            if not await self.engine.step():
                await self.engine.wait(_WAIT_S)
            elif not first_s and choice.tokens:
                first_s = time.perf_counter() - began
        if generation.failure is not None:
            raise RuntimeError(f"{generation.failure.code}: {generation.failure.message}")
        return Turn(first_s, list(choice.tokens), choice.sequence.cached)

    def ids(self, prompt: Sequence[int]) -> list[bytes]:
        """Return the ids of a prompt's full pages."""
        root = root_id(self.runner.fingerprint, "")
        return TokenSequence("", 0, 0, prompt, root=root, most=len(prompt)).ids

    def keys(self, prompt: Sequence[int]) -> list[PageKey]:
        """Return what a prompt's full pages are called in Redis."""
        groups = range(len(self.tiers.host))
        return [PageKey(page, group) for page in self.ids(prompt) for group in groups]

    def forget(self, prompt: Sequence[int], tier: str) -> None:
        """Evict a prompt's pages from the device or from the host."""
        for pool in self.tiers.device if tier == "device" else self.tiers.host:
            for page_id in self.ids(prompt):
                pool.forget(page_id)

    async def save(self, prompt: Sequence[int]) -> None:
        """Wait until all pages of a prompt that are on the device are on the host, too."""
        wanted = self.ids(prompt)
        while any(pool.find(page) is None for pool in self.tiers.host for page in wanted):
            self.tiering.save()
            await asyncio.sleep(0.001)

    async def put(self, prompt: Sequence[int]) -> None:
        """Wait until all pages of a prompt are in Redis; TimeoutError if they do not come there."""
        assert self.store is not None
        keys = self.keys(prompt)
        async with asyncio.timeout(PUT_S):
            while None in await self.store.where(keys):  # noqa: ASYNC110 - Redis rings nobody
                await asyncio.sleep(0.005)
