"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from common.bus import Bus, Notifications
from tests.support.engine import Desk


@pytest.fixture
async def desk(bus: Bus) -> AsyncIterator[Desk]:
    """A router's side of the bus."""
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    yield Desk(bus, journal)
    await journal.stop()
