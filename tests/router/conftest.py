"""One mesh for all of the router's tests, and clients of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.router.mesh import Mesh


@pytest.fixture(scope="session")
def mesh() -> Iterator[Mesh]:
    """A running mesh: Valkey, a sim encoder, vector_search, one router without keys."""
    made = Mesh()
    yield made
    made.close()


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
