"""Greetings and arguments over TCP: the same however the stream is cut, and an error wherever it ends."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pages.identity import PAGE
from common.transport.frames import CALL, HEAD, HELLO, frame
from engine.host.channel import ChannelLayout, GroupLayout, StepTables
from engine.host.tcp_messages import (
    Greeting,
    SlotArguments,
    TcpChallenge,
    TcpHello,
    TcpWelcome,
    prove,
    proves,
)

MESSAGES = (
    TcpChallenge(1, b"n" * 16),
    TcpHello(1, "d" * 32, b"m" * 16, b"p" * 32),
    TcpWelcome(b"layout" * 20, b"q" * 32),
)
STREAM = b"".join(frame(HELLO, 0, msgspec.msgpack.encode(each)) for each in MESSAGES)
LAYOUT = ChannelLayout(
    epoch=1, slots=4, rows=8, entries=64, heads=2, kv_heads=1, dim=16, scale=1.0, cap=0.0, kind=0,
    groups=[GroupLayout(0, 10, 2, 0), GroupLayout(4096, 10, 1, 40)], page_bytes=1 << 20, layer_bytes=4096,
)  # fmt: skip
CUTS = st.lists(st.integers(1, 120), min_size=1, max_size=8)


@contextmanager
def _arriving(stream: bytes, cuts: Sequence[int]) -> Iterator[socket.socket]:
    """Give a connection at which a stream arrives in pieces, and then its end."""
    here, there = socket.socketpair()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    def send() -> None:
        at, sizes = 0, itertools.cycle(cuts)
        while at < len(stream):
            size = next(sizes)
            there.sendall(stream[at : at + size])
            at += size
        there.close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield here
    finally:
        thread.join()
        here.close()


@given(CUTS)
def test_greetings_survive_any_cut(cuts: list[int]) -> None:
    """The pieces in which bytes arrive do not matter."""
    with _arriving(STREAM, cuts) as connection:
        greeting = Greeting(connection)

        assert tuple(greeting.hear(type(each)) for each in MESSAGES) == MESSAGES


@given(st.integers(0, len(STREAM) - 1), CUTS)
def test_a_greeting_that_ends(end: int, cuts: list[int]) -> None:
    """Wherever the connection ends before the last greeting is whole, that is an OSError."""
    with _arriving(STREAM[:end], cuts) as connection:
        greeting = Greeting(connection)
        with pytest.raises(OSError, match="the other side has gone"):
            _ = [greeting.hear(type(each)) for each in MESSAGES]


@given(st.binary(max_size=200))
def test_no_greeting(data: bytes) -> None:
    """Any other bytes are an OSError, too, and none makes this side keep much."""
    with _arriving(data + bytes(HEAD.size), [64]) as connection, pytest.raises(OSError):  # noqa: PT011 - any
        Greeting(connection).hear(TcpHello)


@pytest.mark.parametrize(
    "stream",
    [frame(CALL, 0, b"x"), frame(HELLO, 0, b"\xff"), HEAD.pack(1 << 17, 0, 0, HELLO)],
)
def test_what_is_no_greeting(stream: bytes) -> None:
    """A call, other bytes, and a length that no greeting has are named."""
    with _arriving(stream, [64]) as connection, pytest.raises(ConnectionError):
        Greeting(connection).hear(TcpHello)


def test_a_proof_is_of_one_side_and_one_greeting() -> None:
    """A proof is worth nothing for the other side, with another secret, or for other nonces."""
    said = (b"n" * 16, b"m" * 16, b"digest")
    proof = prove("secret", "helper", *said)

    assert proves(proof, "secret", "helper", *said)
    assert not proves(proof, "secret", "gpu_worker", *said)
    assert not proves(proof, "other", "helper", *said)
    assert not proves(proof, "secret", "helper", said[1], said[0], said[2])
    assert not proves(proof, "secret", "helper", said[0] + said[1], b"", said[2])
    assert not proves(b"", "secret", "helper", *said)


@given(
    st.lists(st.integers(-1, 5 * PAGE), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(-2, 12), max_size=5), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_arguments_name_what_is_there(
    positions: list[int], tables: list[list[int]], groups: int
) -> None:
    """Arguments come back as they went, or are refused: exactly those that name rows and pages the layout has not."""
    starts = np.cumsum([0, *map(len, tables)])
    flat = np.array([page for table in tables for page in table], np.int32)
    ends = np.arange(1, len(positions) + 1)
    step = StepTables(np.array(positions), ends, [flat] * groups, [starts] * groups)
    sound = (
        groups == len(LAYOUT.groups)
        and len(positions) == len(tables)
        and all(-1 <= page < 10 for page in flat)
        and all(
            0 <= at < len(table) * PAGE and table[at // PAGE] >= 0
            for at, table in zip(positions, tables, strict=False)
        )
    )
    data = msgspec.msgpack.encode(SlotArguments.of(step))
    arguments = msgspec.msgpack.decode(data, type=SlotArguments)
    if not sound:
        with pytest.raises(ValueError, match="no place for"):
            arguments.step(LAYOUT)
        return
    found = arguments.step(LAYOUT)
    assert found.positions.tolist() == positions
    assert [each.tolist() for each in found.tables] == [flat.tolist()] * groups
