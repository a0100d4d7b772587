"""A bus on one server and on a cluster, for what kv_store does there."""

from __future__ import annotations

from typing import Any

import pytest

from common.bus import Bus
from common.registry.models import Models
from tests.integration.bus.conftest import bus  # noqa: F401 - a fixture
from tests.support.bus import Hand
from tests.support.servers import Cluster, Server
from tests.support.session_traces import FAMILY, card


@pytest.fixture(params=["valkey", "valkey-cluster"])
def place(request: pytest.FixtureRequest, _shared_servers: dict[str, Any]) -> Any:
    """An empty server or cluster that tests share."""
    kind, _, cluster = request.param.partition("-")
    name = f"cluster-{kind}" if cluster else kind
    if name not in _shared_servers:
        _shared_servers[name] = Cluster.build(kind) if cluster else Server(kind).start()
    _shared_servers[name].flush()
    return _shared_servers[name], 1


@pytest.fixture
async def hand(bus: Bus) -> Hand:  # noqa: F811
    """A generator's worker without loops, its card published."""
    await Models(bus).publish(card(), TOKENIZER)
    return await Hand(bus, FAMILY, "w", fingerprint="f").join()


TOKENIZER = b'{"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 10}]}'
