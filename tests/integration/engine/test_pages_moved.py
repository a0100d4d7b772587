"""A session's pages moved to another mesh and another tenant: found by its next turn there, with the same tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from common.bus import Bus
from common.ids import Family, job_id, ulid
from common.pages.codec import HEADER_BYTES
from common.pages.identity import PAGE, page_ids, root_id
from common.pages.keys import PageKey
from common.pages.store import PageStore
from common.registry.api_keys import KeyStore
from common.registry.sessions import Sessions
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from common.wire.sessions import SessionRecord, Turn
from engine.decoder.executor.torch_executor import TorchExecutor
from tests.integration.engine.test_pages_below import NEW, loaded, model, prompt_of, put, serving
from tests.integration.pages.test_store import opened
from tests.support.engine import Desk, tokens_of
from tests.support.mesh import Mesh, Process
from tests.support.servers import Server
from tests.support.turns import made, turn_of

__all__ = ["model"]
PAGES = 10
EXPORT, IMPORT = "/v1/sessions/{}/export/pages", "/v1/sessions/{}/import/pages"


@pytest.fixture
def tiers() -> Iterator[tuple[Server, Server]]:
    """Two meshes' Redis of pages."""
    made_ = Server(appendonly="no").start(), Server(appendonly="no").start()
    yield made_
    for server in made_:
        server.close()


@pytest.fixture
async def clients(
    bus: Bus, tiers: tuple[Server, Server], tmp_path: Path, monkeypatch: Any
) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
    """A tenant's client of each mesh: `t` of the first, `u` of the second; they share a bus, not their pages."""
    made_: dict[str, aiohttp.ClientSession] = {}
    routers = []
    for tenant, tier in zip("tu", tiers, strict=True):
        monkeypatch.setenv("SPILLWAY_PAGES_URL", tier.url)
        flags = ("--port", "0", "--keys", "on")
        routers.append(Process("router", tmp_path, bus.config.redis_url, tenant, *flags).start())
        _, key = await KeyStore(bus).create(tenant)
        made_[tenant] = aiohttp.ClientSession(
            Mesh.address(routers[-1]), headers={"Authorization": f"Bearer {key}"}
        )
    yield made_
    for client in made_.values():
        await client.close()
    for router in routers:
        router.kill()


async def say(
    bus: Bus, desk: Desk, runner: TorchExecutor, prompt: list[int], tenant: str
) -> tuple[list[int], int]:
    """Generate after a prompt of a tenant; return the tokens, and how many of the prompt's were found."""
    work = GenerateWork(
        prompts=[prompt],
        max_new=NEW,
        fingerprint=runner.fingerprint,
        scope=tenant,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )
    here = Desk(bus, desk.journal, Family(runner.card(created_ms=0, partitions=1).family))
    pieces, result = await here.result(await here.admit(work))
    return tokens_of(pieces), result.cached_tokens


async def session(bus: Bus, tenant: str, fingerprint: str, tokens: list[int]) -> SessionRecord:
    """A session whose turns have these tokens, as an import makes it."""
    family = Family("chat.llama")
    record = await made(bus, family, tenant, fingerprint=fingerprint)
    cut = len(tokens) // 3
    turns: list[Turn] = [
        msgspec.structs.replace(turn_of(record.id), prompt=tokens[:cut], output=[]),
        msgspec.structs.replace(turn_of(record.id, cut), prompt=tokens[cut:], output=[]),
    ]
    record = msgspec.structs.replace(record, id=job_id(family, ulid()))
    await Sessions(bus).create(record, turns)
    return record


async def sent(
    client: aiohttp.ClientSession, record: SessionRecord, data: bytes, status: int = 200
) -> Any:
    """Import pages into a session, in parts."""

    async def parts() -> AsyncIterator[bytes]:
        for first in range(0, len(data), 50_000):
            yield data[first : first + 50_000]

    async with client.post(IMPORT.format(record.id), data=parts()) as response:
        found = await response.json()
        assert response.status == status, found
        return found


async def received(
    client: aiohttp.ClientSession, record: SessionRecord, status: int = 200
) -> bytes:
    """Export a session's pages."""
    async with client.get(EXPORT.format(record.id)) as response:
        assert response.status == status, await response.text()
        return await response.read()


async def test_pages_move_with_a_session(
    bus: Bus,
    desk: Desk,
    model: Path,
    tiers: tuple[Server, Server],
    clients: dict[str, aiohttp.ClientSession],
) -> None:
    """Exported, imported for another tenant elsewhere, and found there by the next turn, which says the same."""
    prompt = prompt_of(PAGES)
    first = loaded(model)
    async with serving(bus, first, tiers[0].url) as worker:
        expected, _ = await say(bus, desk, first, prompt, "t")
        await put(worker, PAGES)
    source = await session(bus, "t", first.fingerprint, prompt)
    data = await received(clients["t"], source)
    head, _, values = data.partition(b"\n")
    assert msgspec.json.decode(head)["pages"] == PAGES
    target = await session(bus, "u", first.fingerprint, prompt)
    counts = {"stored": PAGES, "exists": 0, "refused": 0, "damaged": 0, "foreign": 0}
    moved = await sent(clients["u"], target, data)
    assert moved == {
        "object": "session.pages",
        "session": target.id,
        **counts,
        "bytes": len(values),
    }
    assert await sent(clients["u"], target, data) == moved | {
        "stored": 0,
        "exists": PAGES,
        "bytes": 0,
    }
    second = loaded(model)
    async with serving(bus, second, tiers[1].url) as worker:
        again, found = await say(bus, desk, second, prompt, "u")
        prefetcher = worker.loop.engine.offload.prefetcher
        assert prefetcher is not None
        assert prefetcher.fetched["redis"] > 0
        assert prefetcher.corrupt == 0
    assert again == expected
    assert found > 0


def pages_of(fingerprint: str, tenant: str, tokens: list[int]) -> list[PageKey]:
    """The names of a conversation's pages."""
    return [PageKey(page) for page in page_ids(root_id(fingerprint, tenant), tokens)]


async def test_what_is_not_taken(
    bus: Bus,
    desk: Desk,
    model: Path,
    tiers: tuple[Server, Server],
    clients: dict[str, aiohttp.ClientSession],
) -> None:
    """Damaged and foreign pages are dropped and counted; a torn bundle, another model and another's session refused."""
    prompt = prompt_of(4)
    runner = loaded(model)
    async with serving(bus, runner, tiers[0].url) as worker:
        await say(bus, desk, runner, prompt, "t")
        await put(worker, 4)
    print_ = runner.fingerprint
    source = await session(bus, "t", print_, prompt)
    data = await received(clients["t"], source)
    size = (len(data) - data.index(b"\n") - 1) // 4
    begin = data.index(b"\n") + 1
    target = await session(bus, "u", print_, prompt[: 3 * PAGE])
    store = opened(tiers[1], budget=1 << 28)

    bad = bytearray(data)
    bad[begin + size + HEADER_BYTES + 5] ^= 8
    found = await sent(clients["u"], target, bytes(bad))
    kinds = ("stored", "damaged", "foreign")
    assert [found[kind] for kind in kinds] == [2, 1, 1]
    mine = pages_of(print_, "u", prompt)
    assert await store.where(mine) == ["redis", None, "redis", None]
    assert await PageStore.get(store, mine[0]) != data[begin : begin + size]  # its name is its own

    refused = await sent(clients["u"], target, data[:-1], 400)
    assert refused["error"]["code"] == "invalid_pages"
    assert await store.where(mine) == ["redis"] * 3 + [None]  # what had come whole is there
    other = await session(bus, "u", "another", prompt)
    refused = await sent(clients["u"], other, data, 409)
    assert refused["error"]["code"] == "fingerprint_mismatch"
    for client, record in ((clients["u"], source), (clients["t"], target)):
        assert (await sent(client, record, data, 404))["error"]["code"] == "session_not_found"
        await received(client, record, 404)
    await Sessions(bus).mark_deleted(target.id)
    await sent(clients["u"], target, data, 404)
    tiers[1].kill()
    refused = await sent(clients["u"], await session(bus, "u", print_, prompt), data, 503)
    assert refused["error"]["code"] == "pages_down"
    await store.close()
