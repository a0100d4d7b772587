"""A helper over TCP: who is refused, what is sent, and a connection that is cut anywhere; always the same bits."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch

from bench.engine.helper_process import local_address, wait_until
from common.cost.linear import Probe
from common.cost.online import OnlineCost
from common.errors import ConfigError
from common.types.helper_address import HelperAddress
from engine.decoder.executor.torch_executor import StepRows
from engine.host.channel import ChannelLibrary, load_channel
from engine.host.tcp_channel import TcpChannel
from engine.host.tcp_helper import TcpHelper
from engine.host.tcp_messages import Greeting, TcpChallenge, TcpHello, TcpWelcome, prove
from engine.models.decoders.compiled_decoder import load_kernels
from tests.support.host_sides import LAYERS, Sides, check_same, step, two_sides

CUTS = 300 if os.environ.get("SPILLWAY_PROFILE") == "soak" else 8
GREETING_BYTES, ECHO_BYTES, STEP_BYTES = 1500, 1 << 20, 400_000
pytestmark = pytest.mark.skipif(
    load_kernels() is None or load_channel() is None, reason="no compiler for the kernels"
)


@pytest.fixture(params=[torch.float32], ids=str)
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sides]:
    with two_sides(local_address("tcp", tmp_path), request.param) as made:
        yield made


def _library() -> ChannelLibrary:
    found = load_channel()
    assert found is not None
    return found


@contextmanager
def _helping(address: HelperAddress) -> Iterator[TcpHelper]:
    """Attach a helper of this process."""
    helper = TcpHelper(address, _library())
    thread = threading.Thread(target=helper.serve, args=(1,))
    thread.start()
    try:
        yield helper
    finally:
        helper.stop()
        thread.join()
        helper.close()


def _channel(sides: Sides) -> TcpChannel:
    wait_until(lambda: sides.helped.listener.channel)
    channel = sides.helped.listener.channel
    assert isinstance(channel, TcpChannel)
    return channel


def _pages(sides: Sides) -> int:
    """Return how many layers of pages were sent by now, of the groups that take as much each."""
    return _channel(sides).moved["pages"] // _channel(sides).layout.layer_bytes


def test_only_what_changed_is_sent(sides: Sides) -> None:
    """Pages go once; then rows only, until something else writes a page, or this process appends without the helper."""

    def same(more: int) -> None:
        queries = [StepRows([40 + more], [[3, 9]] * 2), StepRows([5 + more], [[5]] * 2)]
        ours, alone = (step(side, queries, more) for side in (sides.ours, sides.alone))
        assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))

    with _helping(sides.address):
        assert _pages(sides) == 0
        same(0)
        assert _pages(sides) == 3 * LAYERS
        for more in range(1, 20):
            same(more)
        assert _pages(sides) == 3 * LAYERS
        assert sides.helped.layers["helper"] == 2 * LAYERS * 20
        for side in (sides.ours, sides.alone):
            side.pools[0].data[9] += 1
        sides.ours.pools[0].written([9])
        same(20)
        written = len(sides.ours.pools[0].layers)
        assert _pages(sides) == 3 * LAYERS + written
        link = sides.helped.link
        assert link is not None
        assert link.kind == "tcp"
        assert link.cost.seconds(0, 1 << 20) > 0
    wait_until(lambda: sides.helped.listener.channel is None)
    assert sides.helped.link is None
    same(21)
    with _helping(sides.address):
        before = _channel(sides).moved["pages"] // _channel(sides).layout.layer_bytes
        same(22)
        assert _pages(sides) == before + 3 * LAYERS
    assert sides.helped.layers["worker"] == 2 * LAYERS
    assert sides.helped.layers["late"] == 0


def test_pages_that_take_long_go_ahead(sides: Sides) -> None:
    """Over a slow way this process attends until the helper has the pages, all layers of them; then the helper does."""
    layers = sides.helped.layers
    with _helping(sides.address):
        channel = _channel(sides)
        channel._cost = OnlineCost([Probe(0, 1, 1e-3), Probe(0, 1 << 20, 1e3)])
        check_same(sides, 1)
        assert layers["helper"] == 0 < layers["worker"]
        assert channel.moved["pages"] > 0 == channel.moved["rows"]

        def attended() -> bool:
            check_same(sides, 1)
            return layers["helper"] > 0

        wait_until(attended)
        assert channel.moved["rows"] > 0
    assert layers["late"] == 0


def test_who_is_refused(sides: Sides) -> None:
    """Another secret, build or version, a second helper, and a gpu_worker that does not know the secret."""
    library, address = _library(), sides.address
    with pytest.raises(ConfigError, match="does not know the secret"):
        TcpHelper(address._replace(secret="another one of that length"), library)
    with pytest.raises(ConfigError, match="native library is 0000"):
        TcpHelper(address, ChannelLibrary(library.functions, "0" * 32))
    with socket.create_connection((address.host, address.port)) as connection:
        greeting = Greeting(connection)
        nonce = greeting.hear(TcpChallenge).nonce
        proof = prove(address.secret, "helper", nonce, b"m" * 16, library.digest.encode())
        greeting.say(TcpHello(99, library.digest, b"m" * 16, proof))
        assert "version 99" in greeting.hear(TcpWelcome).refusal
    check_same(sides, 1)
    assert sides.helped.layers["helper"] == 0
    with _helping(address):
        _channel(sides)
        with pytest.raises(ConnectionRefusedError, match="another helper is attached"):
            TcpHelper(address, library)
        check_same(sides, 2)
    assert sides.helped.layers["helper"] > 0


def test_a_stranger_is_told_nothing(sides: Sides) -> None:
    """Who says something else learns a nonce alone; a helper attaches after it."""
    with socket.create_connection((sides.address.host, sides.address.port)) as connection:
        Greeting(connection).hear(TcpChallenge)
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with _helping(sides.address):
        _channel(sides)
        check_same(sides, 1)
    assert sides.helped.layers["helper"] > 0


def test_a_gpu_worker_without_the_secret() -> None:
    """A helper computes for nobody who does not prove the secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def welcome() -> None:
            connection, _ = listener.accept()
            with connection:
                greeting = Greeting(connection)
                greeting.say(TcpChallenge(1, b"n" * 16))
                hello = greeting.hear(TcpHello)
                # What the helper said is said back.
                greeting.say(TcpWelcome(msgspec.msgpack.encode({}), hello.proof))

        thread = threading.Thread(target=welcome)
        thread.start()
        address = HelperAddress(
            "", "127.0.0.1", listener.getsockname()[1], "a secret of some length"
        )
        with pytest.raises(ConfigError, match="does not know the secret"):
            TcpHelper(address, _library())
        thread.join()


class _CutWay:
    """Forwards one connection at a time in pieces of all sizes, and cuts it after `left` bytes (None: never)."""

    def __init__(self, to: HelperAddress, draw: random.Random) -> None:
        self._to, self._draw = to, draw
        self.left: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = to._replace(port=self._listener.getsockname()[1])
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._to.host, self._to.port))
                threading.Thread(target=self._forward, args=(near, far), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << self._draw.randint(0, 17)):
                with self._lock:
                    if self.left is not None:
                        data = data[: self.left]
                        self.left -= len(data)
                    over = self.left == 0
                target.sendall(data)
                if over:
                    break
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.timeout(0 if CUTS > 8 else 120)
def test_a_way_that_is_cut(sides: Sides, seed: int) -> None:
    """A connection that ends after any byte, in a greeting, an echo, pages, rows or results, changes no bit."""
    print(f"seed {seed}")
    draw, layers = random.Random(seed), sides.helped.layers
    way = _CutWay(sides.address, draw)
    for number in range(CUTS):
        if draw.random() < 0.3:
            way.left = draw.randrange(draw.choice((GREETING_BYTES, ECHO_BYTES)))
            with suppress(OSError), _helping(way.address):
                check_same(sides, seed + number)
        else:
            way.left = None
            with _helping(way.address):
                channel = _channel(sides)
                check_same(sides, seed + number)
                way.left = draw.randrange(1, STEP_BYTES)
                turn = 0
                while sides.helped.listener.channel is channel and turn < 50:
                    turn += 1
                    check_same(sides, seed + 1000 * number + turn)
        wait_until(lambda: sides.helped.listener.channel is None)
        check_same(sides, seed - 1)
    way.close()
    assert layers["helper"] > 0
    assert layers["late"] > 0
    assert layers["worker"] > 0


def test_a_helper_that_talks_nonsense(sides: Sides) -> None:
    """Frames that answer nothing end the attachment; the step goes on here."""
    with _helping(sides.address) as helper:
        _channel(sides)
        check_same(sides, 1)
        helper._send(77, b"nothing was asked")
        wait_until(lambda: sides.helped.listener.channel is None)
        check_same(sides, 2)
    assert sides.helped.layers["helper"] > 0
