"""One mesh for all of these tests, and a witness beside each."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.hostile.routes import COLLECTION, DOCUMENT, HELD, TEXT
from tests.support.hostile.world import Witness, World

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


@pytest.fixture(scope="session")
def request_id(world: World) -> str:
    """A finished request of mallory's."""
    reply = world.ask("POST", "/v1/embeddings", {"input": TEXT}, headers={"Spillway-Resume": "60"})
    assert reply.status == 200, reply
    return reply.headers["x-request-id"]


@pytest.fixture
def home(world: World, witness: Witness, request_id: str) -> str:
    """What the requests that work need: a collection with a document, a session; returns a request's id."""
    made = world.ask("POST", "/v1/collections", {"name": COLLECTION})
    assert made.status in {201, 409}, made
    if made.status == 201:
        document = {"id": DOCUMENT, "text": TEXT, "metadata": {"n": 1}}
        url = f"/v1/collections/{COLLECTION}/documents"
        assert world.ask("POST", url, {"documents": [document]}).status == 200
    if world.ask("GET", f"/v1/sessions/{HELD.get('session', 'x')}").status != 200:
        session = world.ask("POST", "/v1/sessions", {})
        assert session.status == 201, session
        HELD["session"] = session.json["id"]
    if world.ask("GET", f"/v1/responses/{HELD.get('response', 'x')}").status != 200:
        body = {"input": TEXT, "max_output_tokens": 1}
        HELD["response"] = world.ask("POST", "/v1/responses", body).json["id"]
    return request_id
