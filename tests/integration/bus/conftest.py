"""A bus on every kind of server: alone, and as a cluster with another family's partition."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.bus import Bus
from common.ids import Family
from tests.conftest import PROFILE
from tests.support.bus import open_bus
from tests.support.servers import KINDS, Cluster, Server

ALL = tuple(f"{kind}-cluster-{n}" for kind in KINDS for n in (1, 3))
PLACES = (*KINDS, *(ALL if PROFILE == "soak" else ("valkey-cluster-3",)))


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, _shared_servers: dict[str, Any]) -> Any:
    """An empty server or cluster that tests share, and how many partitions it should have."""
    kind, _, partitions = request.param.partition("-cluster-")
    name = f"cluster-{kind}" if partitions else kind
    if name not in _shared_servers:
        made = Cluster.build(kind) if partitions else Server(kind).start()
        _shared_servers[name] = made
    server = _shared_servers[name]
    server.flush()
    return server, int(partitions or 1)


@pytest.fixture
def family(place: Any) -> Family:
    """The family under test: the last of its partitions."""
    return Family("embed.test", place[1] - 1)


@pytest.fixture
async def bus(place: Any, tmp_path: Path) -> AsyncIterator[Bus]:
    """An open bus on every place."""
    server = place[0]
    opened = await open_bus(server.url, str(tmp_path), cluster=isinstance(server, Cluster))
    yield opened
    await opened.close()
