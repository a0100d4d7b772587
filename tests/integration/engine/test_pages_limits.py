"""A worker under tenants' limits: what is beyond one's own is not put, and others' pages go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.bus import Bus
from common.pages.identity import owner_id
from common.pages.keeper_client import KeeperClient
from tests.integration.engine.test_pages_below import loaded, model, prompt_of, put, serving
from tests.integration.engine.test_pages_moved import pages_of, say
from tests.integration.pages.test_store import opened
from tests.support.engine import Desk
from tests.support.servers import Server

__all__ = ["model"]


@pytest.fixture
def tier() -> Iterator[Server]:
    """A Redis of pages."""
    server = Server(appendonly="no").start()
    yield server
    server.close()


async def test_one_tenants_limit_is_not_anothers(
    bus: Bus,
    desk: Desk,
    model: Path,
    tier: Server,
) -> None:
    """Pages are counted for their tenant; of one without room nothing is put, and the next one's follow."""
    prompt, runner, store = prompt_of(4), loaded(model), opened(tier, budget=1 << 28)
    await KeeperClient(store, "test", 6000, print).set_limits({owner_id("t"): 0})
    async with serving(bus, runner, tier.url) as worker:
        await say(bus, desk, runner, prompt, "t")
        await say(bus, desk, runner, prompt, "u")
        await put(worker, 4)
        write_back = worker.loop.engine.offload.write_back
        assert write_back is not None
        assert write_back.put["over"] >= 4
    usage = await store.usage()
    assert {owner for share in usage.shares for owner in share} == {owner_id("u")}
    assert usage.pages == 4
    for tenant, tiers in (("t", {None}), ("u", {"redis"})):
        keys = pages_of(runner.fingerprint, tenant, prompt)
        assert set(await store.where(keys)) == tiers
    await store.close()
