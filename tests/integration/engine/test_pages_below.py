"""Pages in the tiers below the host: put by one worker, found by another, and never trusted or waited for too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.engine import random_models
from common.bus import Bus
from common.clock import SystemClock
from common.config import WorkerConfig
from common.errors import ConfigError
from common.ids import Family
from common.pages import keys as names
from common.pages.identity import PAGE
from common.pages.store import PageStore
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from engine.decoder.executor.page_copier import Int8Form
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.scheduler import StepLimits
from tests.support.engine import Desk, Worker, running, tokens_of
from tests.support.servers import Server

BOUNDS = StepLimits(64, 4)
NEW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose pages are dear enough to be fetched."""
    directory = tmp_path_factory.mktemp("llama")
    random_models.write(directory, "llama", random_models.settings("llama", 1))
    return directory


@pytest.fixture
def pages() -> Iterator[Server]:
    """A Redis of pages."""
    server = Server().start()
    yield server
    server.close()


def loaded(model: Path, **more: Any) -> TorchExecutor:
    """A worker's runner: nothing of it is shared with another's."""
    return TorchExecutor.load(
        str(model), device="cpu", dtype="fp32", kv_bytes=4 << 20, host_bytes=4 << 20, **more
    )


@asynccontextmanager
async def serving(bus: Bus, runner: TorchExecutor, url: str, **more: Any) -> AsyncIterator[Worker]:
    """Run a worker that computes so slowly, as it believes, that every page is worth fetching and waiting for."""
    config = WorkerConfig(**{"pages_url": url, "page_publish": "through"} | more)
    async with running(bus, runner, bounds=BOUNDS, config=config) as worker:
        prefetcher = worker.loop.engine.offload.prefetcher
        assert prefetcher is not None
        prefetcher._price = lambda depth: depth * 0 + 1000.0
        prefetcher._asking_s = 1.0
        prefetcher.breakers["redis"].came(1, 1.0, 0.0)
        yield worker


async def say(
    bus: Bus, desk: Desk, runner: TorchExecutor, prompt: list[int]
) -> tuple[list[int], int]:
    """Generate after a prompt; return the tokens, and how many of the prompt's were found."""
    work = GenerateWork(
        prompts=[prompt],
        max_new=NEW,
        fingerprint=runner.fingerprint,
        scope="t",
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )
    here = Desk(bus, desk.journal, Family(runner.card(created_ms=0, partitions=1).family))
    pieces, result = await here.result(await here.admit(work))
    return tokens_of(pieces), result.cached_tokens


async def put(worker: Worker, count: int) -> None:
    """Wait until so many pages are in Redis."""
    write_back = worker.loop.engine.offload.write_back
    assert write_back is not None
    async with asyncio.timeout(60):
        while write_back.put["stored"] < count:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


def prompt_of(pages: int) -> list[int]:
    """Return a prompt that ends in the middle of a page."""
    rng = random.Random(pages)
    return [rng.randrange(random_models.VOCABULARY) for _ in range(pages * PAGE + 7)]


async def test_another_worker_goes_on_with_the_pages(
    bus: Bus, desk: Desk, model: Path, pages: Server
) -> None:
    """What one worker computed another one finds in Redis, whole, and says the same."""
    prompt = prompt_of(10)
    first = loaded(model)
    async with serving(bus, first, pages.url) as worker:
        expected, found = await say(bus, desk, first, prompt)
        assert found == 0
        await put(worker, 10)
    second = loaded(model)
    async with serving(bus, second, pages.url) as worker:
        again, found = await say(bus, desk, second, prompt)
        prefetcher = worker.loop.engine.offload.prefetcher
        assert prefetcher is not None
        assert prefetcher.fetched["redis"] > 0
        assert second.copier is not None
        assert second.copier.moved_bytes["load"] > 0
    assert again == expected
    assert found == 10 * PAGE


async def test_a_flipped_bit_in_redis_is_never_used(
    bus: Bus, desk: Desk, model: Path, pages: Server
) -> None:
    """Every page in Redis is damaged: all that is fetched is refused, counted, removed and computed."""
    prompt = prompt_of(6)
    first = loaded(model)
    async with serving(bus, first, pages.url) as worker:
        expected, _ = await say(bus, desk, first, prompt)
        await put(worker, 6)
    store = PageStore.of(WorkerConfig(pages_url=pages.url), SystemClock())
    assert store is not None
    for name in await store.server.call("KEYS", names.VALUES.replace("{", "\\{")):
        value = bytearray(await store.server.call("GET", name))
        value[random.Random(1).randrange(len(value))] ^= 16
        await store.server.call("SET", name, bytes(value), "KEEPTTL")
    second = loaded(model)
    async with serving(bus, second, pages.url) as worker:
        again, found = await say(bus, desk, second, prompt)
        prefetcher = worker.loop.engine.offload.prefetcher
        assert prefetcher is not None
        assert prefetcher.corrupt > 0
        assert prefetcher.fetched["redis"] == 0
    await store.close()
    assert (again, found) == (expected, 0)


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_a_tier_that_is_gone_costs_nothing_but_its_pages(
    bus: Bus, desk: Desk, model: Path, pages: Server, fault: str
) -> None:
    """With the pages Redis hung or dead every answer is the same; after a failure it is not asked for a while."""
    prompt = prompt_of(8)
    first = loaded(model)
    async with serving(bus, first, pages.url) as worker:
        expected, _ = await say(bus, desk, first, prompt)
        await put(worker, 8)
    second = loaded(model)
    async with serving(bus, second, pages.url) as worker:
        prefetcher = worker.loop.engine.offload.prefetcher
        assert prefetcher is not None
        pages.pause() if fault == "stopped" else pages.kill()
        try:
            again, found = await say(bus, desk, second, prompt)
            async with asyncio.timeout(60):
                while not prefetcher.breakers["redis"].misses:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.01)
        finally:
            if fault == "stopped":
                pages.resume()
    assert (again, found) == (expected, 0)


async def test_what_could_not_be_put_is_put_when_the_tier_is_back(
    bus: Bus, desk: Desk, model: Path, pages: Server
) -> None:
    """A turn that ends while the pages Redis is dead loses none of its pages: they go when it lives again."""
    runner = loaded(model)
    pages.kill()
    async with serving(bus, runner, pages.url) as worker:
        for count in (10, 11):  # together more than are put at once
            await say(bus, desk, runner, prompt_of(count))
        write_back = worker.loop.engine.offload.write_back
        assert write_back is not None
        await asyncio.sleep(0.2)  # it has tried
        assert not write_back.put
        pages.start()
        await put(worker, 21)


async def test_pages_of_a_session_that_returned_wait_for_idle_cores(
    bus: Bus, desk: Desk, model: Path, pages: Server
) -> None:
    """While other sequences compute on the same cores no page of an ended turn is put; then all are."""
    runner = loaded(model)
    async with serving(bus, runner, pages.url, page_publish="selective") as worker:
        offload = worker.loop.engine.offload
        assert offload.write_back is not None
        assert not offload._competes()  # nothing runs
        offload.scheduler.running.append(None)  # type: ignore[arg-type]
        assert offload._competes()
        offload.scheduler.running.clear()
        offload.write_back._competes = lambda: True
        for _ in range(2):
            await say(bus, desk, runner, prompt_of(10))
        assert len(offload.write_back._waiting) >= 10
        await asyncio.sleep(0.7)  # longer than the pause between two tries
        assert not offload.write_back.put
        offload.write_back._competes = offload._competes
        await put(worker, 10)


async def test_the_lossy_form_is_labelled_and_smaller(
    bus: Bus, desk: Desk, model: Path, pages: Server
) -> None:
    """In 8 bits pages take about a quarter, and nobody who keeps them exactly can take them for its own."""
    prompt = prompt_of(6)
    first = loaded(model, form="int8")
    assert first.fingerprint != loaded(model).fingerprint
    assert first.copier is not None
    async with serving(bus, first, pages.url) as worker:
        await say(bus, desk, first, prompt)
        await put(worker, 6)
    written = first.copier.moved_bytes["put"]
    assert written < 0.4 * 6 * first.shape.page_bytes[0]
    second = loaded(model, form="int8")
    async with serving(bus, second, pages.url) as worker:
        _, found = await say(bus, desk, second, prompt)
        prefetcher = worker.loop.engine.offload.prefetcher
        assert prefetcher is not None
        assert prefetcher.fetched["redis"] > 0
    assert found > 0
    with pytest.raises(ConfigError, match="SPILLWAY_PAGE_FORM is 'int8' and SPILLWAY_EXACT is on"):
        loaded(model, form="int8", exact=True)


@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_lossy_form_is_near(seed: int, dtype: torch.dtype) -> None:
    """Each number comes back within half a 127th of its row's largest, and what its type rounds."""
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rows[seed % 64] = 0
    form = Int8Form(dtype, 16)
    plain = rows.view(torch.uint8).reshape(-1).numpy()
    small = form.shrink(plain)
    assert len(small) == form.size(len(plain))
    back = torch.from_numpy(form.grow(small)).view(dtype).view(64, 16).float()
    limit = rows.float().abs().amax(dim=1, keepdim=True) * (0.5 / 127 + 2**-8 + 1e-6)
    assert ((back - rows.float()).abs() <= limit).all()


async def test_a_worker_that_is_stopped_leaves_its_pages(
    bus: Bus, desk: Desk, model: Path, pages: Server
) -> None:
    """What a first turn computed is put when its worker is stopped in order, whatever is put before."""
    prompt = prompt_of(9)
    first = loaded(model)
    async with serving(bus, first, pages.url, page_publish="back") as worker:
        expected, _ = await say(bus, desk, first, prompt)
        write_back = worker.loop.engine.offload.write_back
        assert write_back is not None
        assert not write_back.put
    second = loaded(model)
    async with serving(bus, second, pages.url):
        again, found = await say(bus, desk, second, prompt)
    assert write_back.put["stored"] >= 9
    assert again == expected
    assert found > 0
