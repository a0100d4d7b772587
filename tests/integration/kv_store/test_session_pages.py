"""Sessions with their pages by the command line, on real services: exported, imported, pinned, unpinned."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from common.pages.codec import Header, encode
from common.pages.keys import PageKey
from common.pages.store import PageStore
from services.kv_store.pages.session_pages import session_pages
from tests.integration.kv_store.test_service import Small, ask, created, say
from tests.integration.pages.test_store import opened
from tests.support.scripted_generator import FINGERPRINT, NAME, generator
from tests.support.servers import Server

TEXT = "so long that it fills some pages, " * 8


@pytest.fixture(scope="module")
def mesh() -> Iterator[tuple[Small, Server]]:
    """A router and a kv_store on one Redis, and one of pages."""
    pages = Server("valkey", appendonly="no").start()
    before = os.environ.get("SPILLWAY_PAGES_URL")
    os.environ["SPILLWAY_PAGES_URL"] = pages.url
    try:
        made = Small()
    finally:
        os.environ.pop("SPILLWAY_PAGES_URL")
        if before is not None:
            os.environ["SPILLWAY_PAGES_URL"] = before
    yield made, pages
    made.close()
    pages.close()


@pytest.fixture
async def http(mesh: tuple[Small, Server]) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the router, while a generator says back what it is told."""
    small, _ = mesh
    async with (
        generator(small.redis.url, small.directory, fingerprint=FINGERPRINT),
        aiohttp.ClientSession(small.url, timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        while NAME not in str(await ask(session, "GET", "/v1/models")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        yield session


@pytest.fixture
async def store(mesh: tuple[Small, Server]) -> AsyncIterator[PageStore]:
    """The mesh's pages."""
    made = opened(mesh[1], budget=1 << 28)
    yield made
    await made.close()


async def computed(mesh: tuple[Small, Server], store: PageStore, session: str) -> list[PageKey]:
    """Put pages for what was said in a session, as a worker would; return their names."""
    bus = await mesh[0].bus()
    keys = [PageKey(page) for page in await session_pages(bus, session)]
    await bus.close()
    for key in keys:
        head = Header(id=key.id, parent=bytes(16), depth=0, layers=1, layer_bytes=5000)
        assert await store.put(key, encode(head, [os.urandom(5000)]), 600) == "stored"
    return keys


async def spillway(url: str, *words: str, status: int = 0) -> tuple[str, str]:
    """Run a command on sessions; return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "sessions", *words, "--url", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == status, (out, err)
    return out.decode(), err.decode()


async def test_exported_and_imported_with_pages(
    mesh: tuple[Small, Server], http: aiohttp.ClientSession, store: PageStore, tmp_path: Path
) -> None:
    """Two files hold a session; of them a new one is made whose pages are there; without a file there is an error."""
    url, name = mesh[0].url, (await created(http))["id"]
    await say(http, name, TEXT)
    keys = await computed(mesh, store, name)
    assert len(keys) > 10
    document, pages = str(tmp_path / "session.json"), str(tmp_path / "session.pages")
    await spillway(url, "export", name, "-o", document, "--pages", pages)
    assert (await store.remove(keys))[0] == len(keys)

    out, err = await spillway(url, "import", document, "--pages", pages)
    assert err.startswith(f"pages: {len(keys)} are there now; 0 found no room")
    assert await store.where(keys) == ["redis"] * len(keys)  # the tenant is the same
    assert await say(http, out.strip(), "and then") == "and then"
    _, err = await spillway(url, "import", document, "--pages", f"{pages}.none", status=2)
    assert "expected what `export --pages` wrote" in err
    _, err = await spillway(url, "import", document, "--pages", document, status=1)
    assert "these are no pages to import" in err


async def test_pinned_and_unpinned(
    mesh: tuple[Small, Server], http: aiohttp.ClientSession, store: PageStore
) -> None:
    """A session says whether it is pinned, in a list, too; what the next turn adds is pinned in time."""
    url, name = mesh[0].url, (await created(http))["id"]
    await say(http, name, TEXT[::-1])
    keys = await computed(mesh, store, name)
    assert "pinned" not in (await spillway(url, "show", name))[0]
    assert (await spillway(url, "pin", name))[0].endswith("pinned\n")
    found = await ask(http, "GET", f"/v1/sessions/{name}")
    assert found["pinned"]
    (listed,) = [s for s in (await ask(http, "GET", "/v1/sessions"))["data"] if s["id"] == name]
    assert listed["pinned"]
    scores = await asyncio.gather(
        *(store.server.call("ZSCORE", f"{{pages/{k.partition}}}:pins", k.member) for k in keys)
    )
    assert min(map(float, scores)) > store.now_ms() + 6 * 24 * 3_600_000
    assert not (await ask(http, "PATCH", f"/v1/sessions/{name}", {"pin": False}))["pinned"]
    assert (await ask(http, "PATCH", f"/v1/sessions/{name}", {"pin": 1}, 400))["error"]
    await ask(http, "PATCH", "/v1/sessions/none", {"pin": True}, 404)
