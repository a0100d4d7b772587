"""What kv_store refuses reaches an HTTP client with the status that the documentation promises."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from common.pages.codec import Header, encode
from common.pages.keys import PageKey
from common.registry.api_keys import KeyStore
from services.kv_store.pages.session_pages import session_pages
from tests.integration.kv_store.test_service import Small, ask, created, say
from tests.integration.pages.test_store import opened
from tests.support.scripted_generator import FINGERPRINT, NAME, generator
from tests.support.servers import Server

TEXT = "a turn that fills some pages, " * 8


@pytest.fixture
def small() -> Iterator[Small]:
    """A router, and a kv_store that has no pages Redis."""
    made = Small()
    yield made
    made.close()


@pytest.fixture
def pages() -> Iterator[Server]:
    """A pages Redis."""
    made = Server("valkey", appendonly="no").start()
    yield made
    made.close()


@pytest.fixture
async def http(small: Small) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the router, while a generator says back what it is told."""
    async with (
        generator(small.redis.url, small.directory, fingerprint=FINGERPRINT),
        aiohttp.ClientSession(small.url, timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        while NAME not in str(await ask(session, "GET", "/v1/models")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # a router reads the cards once a second
        yield session


async def refused(http: aiohttp.ClientSession, name: str) -> tuple[int, Any, str | None]:
    """Ask to pin a session; return status, code and Retry-After of the refusal."""
    async with http.post(f"/v1/sessions/{name}", json={"pin": True}) as response:
        error = (await response.json())["error"]
        return response.status, error["code"], response.headers.get("Retry-After")


async def test_why_a_session_cannot_be_pinned(
    small: Small, pages: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tier of pages and a tenant's budget are conflicts; a pages Redis that is away is asked again later."""
    name = (await created(http))["id"]
    await say(http, name, TEXT)
    assert await refused(http, name) == (409, "no_page_tier", None)

    small.store.stop()
    monkeypatch.setenv("SPILLWAY_PAGES_URL", pages.url)
    small.store = small.start("kv_store", "1", "--sweep-s", "1")
    await asyncio.to_thread(small.store.ports)
    await _compute(small, pages, name)
    bus = await small.bus()
    await KeyStore(bus).create("default", page_bytes=16)
    await bus.close()
    while (found := await refused(http, name))[1] == "no_worker":  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # a router reads once a second who is there
    assert found == (409, "pin_over_budget", None)

    pages.kill()
    assert await refused(http, name) == (503, "pages_down", "5")


async def _compute(small: Small, pages: Server, session: str) -> None:
    """Put the pages of what was said in a session, as a worker would."""
    bus, store = await small.bus(), opened(pages, budget=1 << 28)
    for page in await session_pages(bus, session):
        key = PageKey(page)
        head = Header(id=key.id, parent=bytes(16), depth=0, layers=1, layer_bytes=5000)
        assert await store.put(key, encode(head, [os.urandom(5000)]), 600) == "stored"
    await store.close()
    await bus.close()
