"""One tenant's things do not exist for another, on any route; and secrets are nowhere they could be read."""

from __future__ import annotations

import stat
import threading
import urllib.request
from pathlib import Path

import pytest

from tests.support.hostile import wire
from tests.support.hostile.clear import clear, refused
from tests.support.hostile.routes import BODIES, GUARDED, TEXT, Operation
from tests.support.hostile.world import Witness, World

OWN = {"model"}  # path parameters that name what all tenants share


@pytest.fixture(scope="module")
def alices(world: World) -> dict[str, str]:
    """What alice owns: a collection with a document, a finished request, a session and a response."""
    made = world.ask("POST", "/v1/collections", {"name": "secret"}, tenant="alice")
    assert made.status == 201, made
    document = {"id": "diary", "text": "alice keeps a diary"}
    url = "/v1/collections/secret/documents"
    assert world.ask("POST", url, {"documents": [document]}, tenant="alice").status == 200
    asked = world.ask(
        "POST", "/v1/embeddings", {"input": TEXT}, tenant="alice", headers={"Spillway-Resume": "60"}
    )
    assert asked.status == 200
    kept = world.ask("POST", "/v1/sessions", {"metadata": {"diary": 1}}, tenant="alice")
    assert kept.status == 201, kept
    said = world.ask("POST", "/v1/responses", {"input": "diary"}, tenant="alice")
    assert said.status == 200, said
    return {
        "response": said.json["id"],
        "name": "secret",
        "id": "diary",
        "request": asked.headers["x-request-id"],
        "session": kept.json["id"],
    }


def _given(operation: Operation, owned: dict[str, str]) -> dict[str, str]:
    given = {"name": owned["name"], "id": owned["id"], "shard": "0"}
    if "/requests/" in operation.template:
        given["id"] = owned["request"]
    if "/sessions/" in operation.template:
        given["id"] = owned["session"]
    if "/responses/" in operation.template:
        given["id"] = owned["response"]
    return {name: given[name] for name in operation.path_parameters if name not in OWN}


TENANTS_OWN = [op for op in GUARDED if set(op.path_parameters) - OWN]


@pytest.mark.parametrize("operation", TENANTS_OWN, ids=str)
def test_another_tenants_ids(
    operation: Operation, world: World, witness: Witness, alices: dict[str, str]
) -> None:
    """What another tenant owns answers exactly as what does not exist: 404; and stays as it was."""
    target = operation.target("", **_given(operation, alices))
    nowhere = {
        name: value.replace("secret", "absent") for name, value in _given(operation, alices).items()
    }
    if "/requests/" in operation.template:
        nowhere["id"] = alices["request"][:-3] + "zzz"
    if "/sessions/" in operation.template:
        nowhere["id"] = alices["session"][:-3] + "zzz"
    if "/responses/" in operation.template:
        nowhere["id"] = alices["response"][:-3] + "zzz"
    absent = operation.target("", **nowhere)

    theirs = world.ask(operation.method, target, operation.body)
    nobodys = world.ask(operation.method, absent, operation.body)

    refused(theirs)
    assert (theirs.status, theirs.code) == (nobodys.status, nobodys.code)
    assert theirs.status == 404
    message = nobodys.json["error"]["message"]
    for name, value in nowhere.items():
        message = message.replace(value, _given(operation, alices)[name])
    assert theirs.json["error"]["message"] == message
    still = world.ask("GET", "/v1/collections/secret/documents/diary", tenant="alice")
    assert still.json["text"] == "alice keeps a diary"
    kept = world.ask("GET", f"/v1/sessions/{alices['session']}", tenant="alice")
    assert kept.json["metadata"] == {"diary": 1}


@pytest.mark.parametrize("what", ["session", "collection", "both"])
def test_what_a_chat_names(
    what: str, world: World, witness: Witness, alices: dict[str, str]
) -> None:
    """A chat cannot continue another tenant's session nor be answered from its collection: as if they were not."""

    def named(session: str, collection: str) -> wire.Reply:
        body: dict[str, object] = {"messages": [{"role": "user", "content": "diary"}]}
        if what in {"session", "both"}:
            body["session"] = session
        if what in {"collection", "both"}:
            body["retrieval"] = {"collection": collection, "include_passages": True}
        return world.ask("POST", "/v1/chat/completions", body)

    theirs = named(alices["session"], "secret")
    nobodys = named(alices["session"][:-3] + "zzz", "absent")

    refused(theirs)
    assert (theirs.status, theirs.code) == (nobodys.status, nobodys.code)
    assert theirs.status == 404
    assert b"diary" not in theirs.body
    kept = world.ask("GET", f"/v1/sessions/{alices['session']}", tenant="alice")
    assert kept.json["version"] == 0


def test_every_route_is_walked() -> None:
    """A route whose path names something belongs to the walk above, unless it is shared by all."""
    named = [op for op in GUARDED if op.path_parameters]
    shared = {op.template for op in named} - {op.template for op in TENANTS_OWN}

    assert shared == {"/v1/models/{model}"}


def test_lists_show_ones_own(world: World, witness: Witness, alices: dict[str, str]) -> None:
    """A list holds the tenant's own things only."""
    names = {
        tenant: {c["name"] for c in world.ask("GET", "/v1/collections", tenant=tenant).json["data"]}
        for tenant in ("alice", "mallory")
    }

    assert names["alice"] == {"secret"}
    assert "secret" not in names["mallory"]
    sessions = {
        tenant: {s["id"] for s in world.ask("GET", "/v1/sessions", tenant=tenant).json["data"]}
        for tenant in ("alice", "mallory")
    }
    keeps = alices["response"].removeprefix("resp_").rpartition("~")[0]  # the response's session
    assert sessions["alice"] == {alices["session"], keeps}
    assert alices["session"] not in sessions["mallory"]


def test_same_names_are_different_things(
    world: World, witness: Witness, alices: dict[str, str]
) -> None:
    """Two tenants' collections of one name share nothing; deleting one leaves the other."""
    assert world.ask("POST", "/v1/collections", {"name": "secret"}).status == 201
    found = world.ask("POST", "/v1/collections/secret/search", BODIES["search"])
    assert found.json["data"] == []
    assert world.ask("DELETE", "/v1/collections/secret").status == 200

    still = world.ask("GET", "/v1/collections/secret/documents/diary", tenant="alice")
    assert still.status == 200


def test_running_work_of_another_tenant_cannot_be_cancelled(world: World, witness: Witness) -> None:
    """Cancelling and following take the owner's key; with another the request goes on to its result."""
    body = {"input": ["water"] * 1500}
    seen: list[wire.Reply] = []
    ask = threading.Thread(
        target=lambda: seen.append(world.ask("POST", "/v1/embeddings", body, tenant="alice"))
    )
    ask.start()
    found = ""
    for _ in range(300):
        keys = world.redis.command("KEYS", "{request/0}:job:*")
        hers = [k for k in keys if world.redis.command("HGET", k, "tenant") == b"alice"]
        if hers:
            found = hers[-1].decode().rpartition(":job:")[2]
            for method, end in (
                ("POST", "/cancel"),
                ("DELETE", ""),
                ("GET", "/events"),
                ("GET", ""),
            ):
                refused(
                    world.ask(method, f"/v1/requests/{found}{end}"), codes={"request_not_found"}
                )
            break
    ask.join(60)
    assert seen[0].status == 200
    assert len(seen[0].json["data"]) == 1500


def test_another_tenants_things_in_a_chat(
    world: World, witness: Witness, alices: dict[str, str]
) -> None:
    """A chat cannot go on with another's session, rest on another's collection, or attach to another's request."""
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    for extra, code in (
        ({"session": alices["session"]}, "session_not_found"),
        ({"retrieval": {"collection": alices["name"]}}, "collection_not_found"),
    ):
        reply = world.ask("POST", "/v1/chat/completions", {**chat, **extra})
        refused(reply, extra, {code})
        assert reply.status == 404
    headers = {"Idempotency-Key": "chat-1"}
    hers = world.ask("POST", "/v1/chat/completions", chat, tenant="alice", headers=headers)
    mine = world.ask("POST", "/v1/chat/completions", chat, headers=headers)
    assert (hers.status, mine.status) == (200, 200)
    assert hers.headers["x-request-id"] != mine.headers["x-request-id"]
    name = hers.headers["x-request-id"]
    for method, end in (("GET", "/events"), ("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        refused(world.ask(method, f"/v1/requests/{name}{end}"), codes={"request_not_found"})


def test_same_idempotency_key_of_two_tenants(world: World, witness: Witness) -> None:
    """A key one tenant has claimed means nothing to another."""
    headers = {"Idempotency-Key": "walk-1"}
    for tenant, text in (("alice", "a"), ("mallory", "b")):
        reply = world.ask("POST", "/v1/embeddings", {"input": text}, tenant=tenant, headers=headers)
        assert reply.status == 200
    reply = world.ask("POST", "/v1/embeddings", {"input": "c"}, tenant="alice", headers=headers)
    refused(reply, codes={"idempotency_conflict"})


def _secrets(world: World) -> list[bytes]:
    return [key.rpartition("-")[2].encode() for key in world.keys.values()]


def test_no_secret_anywhere(world: World, witness: Witness) -> None:
    """No key's secret is in a log, a command line, a metric, a key or value of Redis, or a file of ours."""
    world.ask("GET", "/v1/models", headers={"X-Mistake": world.keys["alice"]})
    world.ask("GET", f"/v1/models/{world.keys['alice']}")
    wire.ask(
        world.port, "GET", "/v1/models", headers={"Authorization": "Basic " + world.keys["alice"]}
    )
    places: dict[str, bytes] = {name: text.encode() for name, text in world.logs().items()}
    for process in world.processes:
        assert process.process is not None
        pid = process.process.pid
        places[f"ps {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{process.ports()['health_port']}/metrics", timeout=10
        ) as reply:
            places[f"metrics {process.service}"] = reply.read()
    for root in (world.directory, world.redis.directory):
        for path in root.rglob("*"):
            if path.is_file():
                places[str(path)] = path.read_bytes()
    for place, content in places.items():
        for secret in _secrets(world):
            assert secret not in content, place


def test_stored_key_is_a_hash(world: World, witness: Witness) -> None:
    """What is stored of a key cannot be used as one."""
    for name in world.redis.command("KEYS", "{key/*}:record"):
        stored = world.redis.command("GET", name)
        for text in (stored.hex(), stored.decode("latin-1")):
            reply = wire.ask(
                world.port,
                "GET",
                "/v1/models",
                key=text.encode("ascii", "ignore").decode().strip() or "x",
            )
            clear(reply)
            assert reply.status in {400, 401}


def test_files_are_private(world: World, witness: Witness) -> None:
    """Others on the machine cannot read documents or logs of writes, even in a data directory open to all."""
    ours = [path for path in world.directory.rglob("*") if path.suffix != ".log"]
    assert len(ours) > 5
    for path in ours:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
