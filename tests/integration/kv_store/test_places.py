"""Where a session's pages are said to lie is where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.bus import Bus
from common.errors import NotFound
from common.pages.identity import PAGE
from common.pages.store import PageStore
from common.registry.cache_directory import CacheDirectory
from common.wire.registry import Held
from common.wire.sessions import SessionWork
from services.kv_store.pages.page_locations import PageLocations
from tests.integration.kv_store.test_page_eraser import pages, session, store  # noqa: F401 - a fixture
from tests.integration.kv_store.test_pages import kept, on_disk, put_all
from tests.support.bus import Hand
from tests.support.session_traces import FAMILY
from tests.support.waiting import until


async def told(places: PageLocations, name: str, tenant: str = "t") -> dict[str, object]:
    """What is said of a session."""
    found: dict[str, object] = json.loads(
        await places.perform(SessionWork(op="places", tenant=tenant, session=name))
    )
    return found


async def test_every_tier(bus: Bus, store: PageStore, tmp_path: Path) -> None:  # noqa: F811
    """Pages are counted in Redis and on disk as they go there, on device and host as the worker that lives says."""
    tokens = [1] * (40 * PAGE)
    record, mine = await session(bus, [tokens]), pages(tokens)
    places = PageLocations(bus, store)
    nowhere = {"device": 0, "host": 0, "redis": 0, "disk": 0}
    said = {"object": "session.pages", "pages": 40, "tiers": nowhere, "worker": None, "told": None}
    assert await told(places, record.id) == said
    hand = await Hand(bus, FAMILY, "w").join()
    held = Held(worker="w", device_tokens=3 * PAGE, host_tokens=5 * PAGE, page=b"", at_ms=7000)
    await CacheDirectory(bus).publish_held(record.id, held)
    async with kept(store, tmp_path):
        await put_all(store, mine)
        found = await told(places, record.id)
        assert found["tiers"] == {"device": 3, "host": 5, "redis": 40, "disk": 0}
        assert (found["worker"], found["told"]) == ("w", 7.0)
        await put_all(store, pages([3] * (200 * PAGE)))
        await until(lambda: on_disk(store, mine[0][0]))
        tiers = (await told(places, record.id))["tiers"]
        assert isinstance(tiers, dict)
        assert tiers["redis"] + tiers["disk"] == 40
        assert tiers["disk"] > 0
    await hand.die()
    found = await told(PageLocations(bus, None), record.id)
    assert found["tiers"] == {"device": 0, "host": 0, "redis": None, "disk": None}
    assert found["worker"] is None
    for name, tenant in ((record.id, "other"), ("nonsense", "t")):
        with pytest.raises(NotFound):
            await told(places, name, tenant)
