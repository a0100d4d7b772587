"""One mesh for all of these tests, and a witness beside each."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.hostile.world import Witness, World

# What must never be seen, whatever is sent.
BROKEN = re.compile(r"Traceback \(most recent|request_crashed|query_loop_failed|background_failed")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """A mesh of real processes, shared: tests leave it as they found it."""
    made = World()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def _witness(world: World) -> Iterator[Witness]:
    made = Witness(world)
    yield made
    made.undisturbed()
    made.close()


@pytest.fixture
def witness(world: World, _witness: Witness) -> Iterator[Witness]:
    """The honest tenant: it has been served rightly up to the test's end, and no process has broken."""
    before = {name: len(text) for name, text in world.logs().items()}
    yield _witness
    _witness.served()
    assert world.alive()
    for name, text in world.logs().items():
        said = text[before[name] :]
        assert not BROKEN.search(said), f"{name}: {said[-3000:]}"
