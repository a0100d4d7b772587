"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.bus import Journal
from tests.engine.kit import Desk


@pytest.fixture
async def desk(bus: Any) -> AsyncIterator[Desk]:
    """A router's side of the bus."""
    journal = Journal(bus, "r1")
    await journal.start()
    yield Desk(bus, journal)
    await journal.stop()
