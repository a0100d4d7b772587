"""One mesh for all of the router's tests, and clients of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from common.bus import Bus
from common.clock import SystemClock
from common.config import StoreConfig
from tests.support.mesh import Mesh
from tests.support.scripted_generator import NAME, Generator, generator, known


@pytest.fixture(scope="session")
def mesh() -> Iterator[Mesh]:
    """A running mesh: Valkey, a sim encoder, vector_search, one router without keys."""
    made = Mesh()
    yield made
    made.close()


@pytest.fixture(scope="session")
def chatting(mesh: Mesh) -> Mesh:
    """The mesh with a sim generator beside the sim encoder."""
    mesh.add_generator()
    return mesh


@pytest.fixture
async def bus(mesh: Mesh) -> AsyncIterator[Bus]:
    """The mesh's bus, as a service opens it."""
    config = StoreConfig(redis_url=mesh.redis.url, data_dir=str(mesh.directory))
    made = await Bus.open(config, SystemClock())
    yield made
    await made.close()


@pytest.fixture
async def http(mesh: Mesh) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose relative URLs are the first router's."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(mesh.url, timeout=timeout) as session:
        yield session


@pytest.fixture
async def name(http: aiohttp.ClientSession) -> AsyncIterator[str]:
    """A collection of this test's own, with the sim encoder."""
    made = f"t{uuid.uuid4().hex[:12]}"
    async with http.post("/v1/collections", json={"name": made}) as response:
        assert response.status == 201
    yield made
    async with http.delete(f"/v1/collections/{made}") as response:
        assert response.status in {200, 404}


@pytest.fixture
async def model(mesh: Mesh, http: aiohttp.ClientSession) -> AsyncIterator[Generator]:
    """A scripted generator on the mesh, known to its router."""
    async with generator(mesh.redis.url, mesh.directory) as made:
        await known(http, NAME)
        yield made
