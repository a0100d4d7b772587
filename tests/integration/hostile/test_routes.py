"""Every kind of bad request at every route: a clear refusal, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import PROFILE, SEED
from tests.support.hostile import wire
from tests.support.hostile.clear import clear, refused
from tests.support.hostile.routes import (
    GUARDED,
    NONSENSE,
    OPEN,
    OPERATIONS,
    TRICKS,
    Operation,
    fields,
    put,
    types,
)
from tests.support.hostile.world import MAX_BODY, Witness, World

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=str)
every_body = pytest.mark.parametrize(
    "operation", [op for op in OPERATIONS if op.schema is not None], ids=str
)
TYPES: dict[str, Any] = {
    "null": None, "boolean": True, "integer": 7, "string": "x", "array": [{}], "object": {"x": 1},
}  # fmt: skip


def _query(operation: Operation, name: str, raw: bytes, home: str) -> bytes:
    return operation.target(home).encode() + b"?" + name.encode() + b"=" + raw


@every_operation
def test_what_works(operation: Operation, world: World, home: str) -> None:
    """The request that hostile ones are made from succeeds, so a refusal is the hostile part's doing."""
    reply = world.ask(operation.method, operation.target(home), operation.body)

    clear(reply)
    # This mesh keeps no pages below its workers, has one process for shards, and has tuned nothing: it says so.
    told = {"no_page_tier" if operation.template.endswith("port/pages") else "collection_exists"}
    if operation.template.endswith("/tune"):
        told |= {"tuning_not_found", "tuning_under_way"}
    if operation.template in {"/metrics", "/openapi.json"}:  # off as shipped
        told |= {"route_not_found"}
    if "{shard}" in operation.template:
        told |= {"shard_busy", "shard_not_found", "too_few_processes"}
    assert reply.status < 300 or reply.code in told, reply


@every_body
def test_wrong_types(operation: Operation, world: World, home: str) -> None:
    """A value of another JSON type is refused at every field, and as the body itself."""
    target = operation.target(home)
    for path, schema in [((), operation.schema), *fields(operation)]:
        taken = types(schema)
        for kind, value in TYPES.items():
            if kind in taken or "any" in taken:
                continue
            raw = json.dumps(put(operation.body, path, value)).encode()
            refused(world.ask(operation.method, target, raw), (path, value))


@every_body
def test_no_json(operation: Operation, world: World, home: str) -> None:
    """What is no JSON, no UTF-8, or no whole document is refused as such."""
    good = json.dumps(operation.body).encode()
    cases = {
        b"{": "invalid_json", b"nul": "invalid_json", good + b"x": "invalid_json", b"\x00": "invalid_json",
        b"\xff\xfe{}": "invalid_utf8", b'{"a": "\xc3\x28"}': "invalid_utf8", b'\xed\xa0\x80': "invalid_utf8",
        b"[" * 100_000: "too_deep", b'{"a":' * 100_000: "too_deep",
    }  # fmt: skip
    if operation.required:
        cases |= {b"": "invalid_json", b" \n": "invalid_json"}
    for raw, code in cases.items():
        codes = {
            code,
            "invalid_json",
            "invalid_value",
            "unknown_field",
        }  # what is wrong first depends on the schema
        reply = world.ask(operation.method, operation.target(home), raw)
        refused(reply, raw[:20], codes)


@every_body
def test_no_numbers(operation: Operation, world: World, home: str) -> None:
    """NaN, infinities and numbers beyond any range are refused at every field that takes a number."""
    target = operation.target(home)
    for path, schema in fields(operation):
        inner = schema.get("items") or {}
        numbers = {"number", "integer"}
        if not types(schema) & numbers and not types(inner) & numbers:
            continue
        wrap = "%s" if types(schema) & numbers else "[%s]"
        for word in (
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            "-1e999",
            "1" + "0" * 400,
            "1" * 5000,
            "0x10",
            "-",
        ):
            marked = json.dumps(put(operation.body, path, "\x01"))
            raw = marked.replace(json.dumps("\x01"), wrap % word).encode()
            reply = world.ask(operation.method, target, raw)
            clear(reply, (path, word))
            assert reply.status >= 400, (path, word, reply)


@every_body
def test_depth(operation: Operation, world: World, home: str) -> None:
    """Values nested a thousand deep are refused at every field, also where any JSON is taken."""
    deep_list, deep_dict = b"[" * 1000 + b"]" * 1000, b'{"a":' * 1000 + b"1" + b"}" * 1000
    for path, _ in fields(operation):
        marked = json.dumps(put(operation.body, path, "\x01")).encode()
        for value in (deep_list, deep_dict):
            raw = marked.replace(json.dumps("\x01").encode(), value)
            refused(world.ask(operation.method, operation.target(home), raw), path)


def _huge(schema: Any) -> Iterator[Any]:
    kinds = types(schema)
    if "string" in kinds:
        yield "x" * 300_000
        yield "\U0001f4a9" * 20_000
    if "array" in kinds:
        yield ["x"] * 30_000
        yield [0.5] * 100_000
        yield [[1] * 1000] * 100
    if kinds & {"integer", "number"}:
        yield from (10**30, -(10**30), 2**63, -1, 0, 2**31)
    if "any" in kinds or "object" in kinds:
        yield {"x": "y" * 200_000}
        yield {f"k{n}": n for n in range(20_000)}


@every_body
def test_huge_values(operation: Operation, world: World, home: str) -> None:
    """Values far beyond any use are refused, or served where they do no harm; never a fault."""
    drawn = random.Random(SEED)
    for path, schema in fields(operation):
        values = list(_huge(schema))
        for value in values if PROFILE == "soak" else drawn.sample(values, min(3, len(values))):
            body = put(operation.body, path, value)
            clear(
                world.ask(operation.method, operation.target(home), body), (path, repr(value)[:40])
            )


def test_huge_bodies(world: World, home: str) -> None:
    """A body over the limit is refused by what it announces, at all routes at once, and by what it turns out to be."""
    with contextlib.ExitStack() as stack:
        sent = []
        for operation in OPERATIONS:
            headers = {"Connection": "close", "Content-Length": "99999999999"}
            target = operation.target(home, name="none", id="none")
            top = wire.head(operation.method, target, world.keys["mallory"], headers)
            made = stack.enter_context(wire.connection(world.port))
            made.sendall(top + b"\r\n{")
            sent.append((operation, made))
        for operation, made in sent:
            clear(wire.read(made), operation)
    for operation in OPERATIONS:
        if operation.schema is not None:
            target = operation.target(home)
            full = world.ask(operation.method, target, b" " * (MAX_BODY + 1))
            refused(full, operation, {"body_too_large"})


@every_operation
def test_long_heads(operation: Operation, world: World, home: str) -> None:
    """Targets and headers longer than any use are refused."""
    long = b"a" * 20_000
    refused(world.ask(operation.method, operation.target(home).encode() + b"?x=" + long))
    header = {"X-Long": "b" * 20_000}
    refused(world.ask(operation.method, operation.target(home), headers=header))
    many = {f"X-{n}": "c" for n in range(1000)}
    refused(world.ask(operation.method, operation.target(home), headers=many))


@every_operation
def test_path_tricks(operation: Operation, world: World, home: str) -> None:
    """Whatever stands for a path's parameter names nothing that exists, on the disk least of all."""
    for name in operation.path_parameters:
        for trick in TRICKS:
            target = operation.target(home, **{name: trick})
            reply = world.ask(operation.method, target, operation.body)
            clear(reply, target)
            assert b"root:" not in reply.body
            if name == "name" or "/requests/" in operation.template:
                assert reply.status in {400, 404, 405}, (target, reply)
    for target in (
        "/.." + operation.target(home),
        "//" + operation.target(home),
        operation.target(home) + "/%00",
    ):
        clear(world.ask(operation.method, target, operation.body), target)


@every_operation
def test_bytes_in_targets(operation: Operation, world: World, home: str) -> None:
    """Raw bytes, spaces and control characters in a target are no HTTP, and are told so."""
    target = operation.target(home).encode()
    for bad in (b"\xff", b"\xc3\xa9", b"\x00", b"\x7f", b" x y"):
        refused(world.ask(operation.method, target + bad, operation.body), bad, {"invalid_http"})


@every_operation
def test_queries(operation: Operation, world: World, home: str) -> None:
    """Every query parameter, known or not, survives nonsense; what cannot be right is refused."""
    for name in [*operation.query_parameters, "unknown"]:
        for raw in NONSENSE if name != "unknown" else NONSENSE[:4]:
            clear(
                world.ask(operation.method, _query(operation, name, raw, home), operation.body),
                (name, raw[:20]),
            )


@every_operation
def test_headers(operation: Operation, world: World, home: str) -> None:
    """Headers that mean something here are refused when they mean nothing; never a fault."""
    seconds = ("nan", "inf", "-1", "1e400", "x", "", "\udcff", "1_0", "9" * 400)
    cases = [(name, text) for name in ("Spillway-Timeout", "Spillway-Resume") for text in seconds]
    cases += [("Idempotency-Key", text) for text in ("k" * 300, "\udcff", "é")]
    cases += [("Last-Event-ID", text) for text in ("-1", "x", "9" * 40, "٣", "\udcff")]
    cases += [("Content-Type", "text/\udcff"), ("Accept", "\udcff"), ("x-request-id", "y" * 4000)]
    cases += [("Content-Encoding", "gzip"), ("Content-Encoding", "br"), ("Expect", "a-miracle")]
    for name, text in cases:
        reply = world.ask(
            operation.method, operation.target(home), operation.body, headers={name: text}
        )
        clear(reply, (name, text))
        taken = ("header", name) in operation.parameters
        if taken and text not in {"", "1_0"} and len(text) != 400:
            refused(reply, (name, text), {"invalid_header", "invalid_http"})


@every_operation
def test_other_methods(operation: Operation, world: World, home: str) -> None:
    """A method a path does not have gets 405 with those it has; one HTTP does not have gets 400."""
    there = {op.method for op in OPERATIONS if op.template == operation.template}
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - there:
        reply = world.ask(method, operation.target(home))
        if reply.status == 404 and reply.code != "route_not_found":
            continue  # `…/documents/delete` is a document's path, too
        assert (reply.status, reply.code) == (405, "method_not_allowed"), (method, reply)
        assert operation.method in reply.headers["allow"]
    refused(world.ask("BREW", operation.target(home)), codes={"invalid_http"})


@pytest.mark.parametrize("operation", GUARDED, ids=str)
def test_wrong_keys(operation: Operation, world: World, home: str) -> None:
    """Without the right key there is 401 and nothing else: not whether a route, name or id exists."""
    good = world.keys["mallory"]
    wrong = [
        {}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer " + good[:-1]},
        {"Authorization": "Bearer " + good + "x"}, {"Authorization": "Basic " + good}, {"Authorization": good},
        {"Authorization": "Bearer sk-sw-aaaaaaaaaaaa-" + "a" * 43}, {"Authorization": "Bearer \udcff"},
        {"Authorization": "Bearer " + "a" * 7000}, {"Authorization": "Bearer ../../etc/passwd"},
        {"Authorization": "Bearer sk-sw-}:record-" + "a" * 43}, {"X-Api-Key": good},
    ]  # fmt: skip
    raw = None if operation.body is None else json.dumps(operation.body).encode()
    for headers in wrong:
        reply = wire.ask(world.port, operation.method, operation.target(home), raw, headers=headers)
        clear(reply, headers)
        assert reply.status == 401, (headers, reply)
        assert reply.headers["www-authenticate"] == "Bearer"


def test_open_routes_need_no_key(world: World, witness: Witness) -> None:
    """Probes ask without a key, and learn nothing but health."""
    for path in OPEN:
        reply = wire.ask(world.port, "GET", path)
        assert reply.status == 200
        assert set(reply.json) == {"service", "ok", "reasons"}
