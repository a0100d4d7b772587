"""Clients that hold, halve or break their connections, at every route at once: none holds anything but itself."""

from __future__ import annotations

import contextlib
import json
import socket
import struct

from tests.support.hostile import wire
from tests.support.hostile.clear import clear, refused
from tests.support.hostile.routes import GUARDED, OPERATIONS, Operation
from tests.support.hostile.wire import Reply
from tests.support.hostile.world import BODY_TIMEOUT_S, Witness, World

NOWHERE = {"name": "none", "id": "none", "model": "none"}


def _target(operation: Operation) -> str:
    return operation.target("none", **NOWHERE)


def _top(world: World, operation: Operation, length: int | None = None) -> bytes:
    headers = {"Connection": "close"}
    if length is not None:
        headers["Content-Length"] = str(length)
    return wire.head(operation.method, _target(operation), world.keys["mallory"], headers)


def _all(
    world: World, sent: list[tuple[Operation, bytes]], witness: Witness
) -> list[tuple[Operation, Reply]]:
    """Send each its own bytes on a connection of its own, keep all open, and read what comes until they are closed."""
    with contextlib.ExitStack() as stack:
        held = []
        for operation, raw in sent:
            made = stack.enter_context(wire.connection(world.port))
            made.sendall(raw)
            held.append((operation, made))
        witness.undisturbed()
        return [(operation, wire.read(made)) for operation, made in held]


def _reset(made: socket.socket) -> None:
    """Close so that the server sees a reset, not an end."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


def test_slow_heads(world: World, witness: Witness) -> None:
    """A head that does not end gets 408 in time, at every route, while others are served."""
    sent = [(op, _top(world, op)) for op in OPERATIONS] + [(op, b"GE") for op in OPERATIONS[:1]]

    for operation, reply in _all(world, sent, witness):
        refused(reply, operation, {"request_timeout"})


def test_silent_connections(world: World, witness: Witness) -> None:
    """A connection that never says anything is closed."""
    with wire.connection(world.port, BODY_TIMEOUT_S + 10) as made:
        assert wire.read(made).status == 0


def test_slow_bodies(world: World, witness: Witness) -> None:
    """A body that does not end gets 408 in time, or is not waited for at all; others are served."""
    sent = [(op, _top(world, op, 50) + b'\r\n{"a": ') for op in OPERATIONS]

    for operation, reply in _all(world, sent, witness):
        clear(reply, operation)
        if operation.schema is not None:
            refused(reply, operation, {"request_timeout", "collection_not_found"})


def test_dripping_body(world: World, witness: Witness) -> None:
    """Bytes that keep coming, but not enough of them, do not buy more time."""
    top = wire.head("POST", "/v1/embeddings", world.keys["mallory"], {"Content-Length": "100"})
    with wire.connection(world.port, 0.3) as made:
        made.sendall(top + b"\r\n")
        parts = []
        for _ in range(40):
            with contextlib.suppress(TimeoutError):
                parts.append(made.recv(4096))
                if not parts[-1]:
                    break
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                made.sendall(b" ")
    refused(wire.parse(b"".join(parts)), codes={"request_timeout"})


def test_half_closed(world: World, witness: Witness) -> None:
    """A client that stops sending has left: whole request, half a body or half a head, its connection ends."""
    for operation in GUARDED:
        body = json.dumps(operation.body).encode() if operation.body is not None else b""
        whole = _top(world, operation, len(body)) + b"\r\n" + body
        for raw in (whole, whole[:-1], whole[: len(whole) // 2], b"G"):
            with wire.connection(world.port) as made:
                made.sendall(raw)
                made.shutdown(socket.SHUT_WR)
                reply = wire.read(made)
            if reply.status:
                clear(reply, operation)


def test_resets(world: World, witness: Witness) -> None:
    """Connections reset at any point of a request disturb nobody."""
    for operation in GUARDED:
        body = json.dumps(operation.body).encode() if operation.body is not None else b"{}"
        whole = _top(world, operation, len(body)) + b"\r\n" + body
        for end in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
            with wire.connection(world.port) as made:
                made.sendall(whole[:end])
                _reset(made)
    witness.undisturbed()


def test_work_of_a_client_that_left_is_cancelled(world: World, witness: Witness) -> None:
    """Many texts asked for and not waited for leave the lanes: the next request is not behind them."""
    body = json.dumps({"input": ["water over the dam"] * 2000}).encode()
    for _ in range(3):
        headers = {"Content-Length": str(len(body))}
        with wire.connection(world.port) as made:
            top = wire.head("POST", "/v1/embeddings", world.keys["mallory"], headers)
            made.sendall(top + b"\r\n" + body)
            _reset(made)
    witness.undisturbed()
    assert world.ask("POST", "/v1/embeddings", {"input": "x"}).status == 200


def test_broken_framing(world: World, witness: Witness) -> None:
    """Lengths and chunks that make no sense are told so; what follows them is not taken for a request."""
    key = world.keys["mallory"]
    top = wire.head("POST", "/v1/embeddings", key)
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    cases = [
        top + b"Content-Length: -1\r\n\r\n" + smuggled,
        top + b"Content-Length: ten\r\n\r\n" + smuggled,
        top + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + smuggled,
        top + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
        top + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + smuggled,
        top + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n" + smuggled,
        top + b"Transfer-Encoding: gzip\r\n\r\n" + smuggled,
        b"POST /v1/embeddings HTTP/9.9\r\nHost: x\r\n\r\n",
        b"POST /v1/embeddings\r\n\r\n",
        top + b"No colon here\r\n\r\n", top + b"Bad\x00Name: x\r\n\r\n", top + b"X: a\x00b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 100 + b"\x00" * 100,
    ]  # fmt: skip
    for raw in cases:
        with wire.connection(world.port) as made:
            made.sendall(raw)
            made.settimeout(BODY_TIMEOUT_S + 10)
            reply = wire.read(made)
        refused(reply, raw[:200])
        assert reply.body.count(b'"error"') == 1, raw


def test_more_connections_than_allowed(world: World, witness: Witness) -> None:
    """A router at its limit of connections says so at once; those it has go on, and room returns."""
    small = world.spawn_router("small", "--max-connections", "8")
    port = small.ports()["port"]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(wire.connection(port)) for _ in range(8)]
        held[0].sendall(
            wire.head("GET", "/v1/models", world.keys["mallory"], {"Connection": "close"})
        )
        reply = Reply(200, {}, b"")
        for _ in range(100):
            reply = wire.ask(port, "GET", "/v1/models", key=world.keys["mallory"])
            if reply.status == 503:
                break
        assert (reply.status, reply.code) == (503, "too_many_connections")
        assert int(reply.headers["content-length"]) == len(reply.body)
        held[0].sendall(b"\r\n")
        assert wire.read(held[0]).status == 200
    for _ in range(100):
        reply = wire.ask(port, "GET", "/v1/models", key=world.keys["mallory"])
        if reply.status == 200:
            break
    assert reply.status == 200
    assert small.stop() == 0
