"""The acceptor of TCP helpers in a gpu_worker: checks who may attach, and measures the round trip to the helper."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Sequence

import msgspec

from common.clock import SYSTEM
from common.cost.linear import Probe
from common.errors import ConfigError
from common.transport.frames import CALL, RESULT
from common.transport.memory_segment import MemorySegment
from common.types.helper_address import HelperAddress
from engine.decoder.executor.interface import Moved
from engine.host.channel import ChannelLayout, ChannelLibrary
from engine.host.handshake import HelperAttached
from engine.host.listener import Attachment
from engine.host.tcp_channel import TcpChannel
from engine.host.tcp_messages import (
    ECHO,
    ECHO_HEAD,
    NONCE_BYTES,
    VERSION,
    Greeting,
    TcpChallenge,
    TcpHello,
    TcpWelcome,
    prove,
    proves,
    tune,
)
from engine.kernels.page_memory import PageMemory

ECHOES = (1, 1 << 10, 1 << 14, 1 << 17, 1 << 20)  # bytes
_REPEATS = 5
_LEAST_S = 1e-9
_ECHO_S = 0.1  # after an echo that took longer than this, no larger echo is sent


class TcpAcceptor:
    """Attaches TCP helpers that know the secret and run the same native library (see `HelperAcceptor`)."""

    def __init__(
        self,
        address: HelperAddress,
        library: ChannelLibrary,
        pools: Sequence[PageMemory],
        segment: MemorySegment,
    ) -> None:
        """Listen for helpers that attend to copies of `pools`; ConfigError if the address cannot be bound."""
        self.moved: Counter[Moved] = Counter()
        self._address, self._library = address, library
        self._pools, self._segment = pools, segment
        self.listener = _listen(address)

    def greet(self, connection: socket.socket, layout: ChannelLayout, taken: str) -> Attachment:
        """Attach a helper with this layout, or refuse it with the reason `taken`, if any; OSError says why not."""
        tune(connection)
        greeting, nonce = Greeting(connection), secrets.token_bytes(NONCE_BYTES)
        greeting.say(TcpChallenge(VERSION, nonce))
        hello = greeting.hear(TcpHello)
        said = (nonce, hello.nonce, hello.digest.encode())
        if why := self._against(hello, said):
            greeting.say(TcpWelcome(refusal=why))
            raise PermissionError(why)
        if taken:
            greeting.say(TcpWelcome(refusal=taken, taken=True))
            raise PermissionError(taken)
        encoded = msgspec.msgpack.encode(layout)
        proof = prove(self._address.secret, "gpu_worker", *said, encoded)
        greeting.say(TcpWelcome(encoded, proof))
        if failure := greeting.hear(HelperAttached).failure:
            raise OSError(failure)
        probes = _echoes(greeting)
        channel = TcpChannel(
            connection, self._library, layout, self._pools, self._segment, probes, self.moved
        )
        return Attachment(channel, channel.gone, channel.close)

    def close(self) -> None:
        """Stop listening."""
        self.listener.close()

    def _against(self, hello: TcpHello, said: Sequence[bytes]) -> str:
        """Return why a helper cannot be attached; empty if it can."""
        if hello.version != VERSION:
            return f"it speaks version {hello.version} of the handshake; expected {VERSION}"
        if not proves(hello.proof, self._address.secret, "helper", *said):
            return "it does not know the secret; expected one SPILLWAY_HOST_SECRET on both sides"
        return self._library.against(hello.digest)


def _echoes(greeting: Greeting) -> list[Probe]:
    """Return the round-trip seconds of echoes of several sizes, the least of a few tries for each size."""
    probes: list[Probe] = []
    for size in ECHOES:
        took = []
        for _ in range(_REPEATS):
            began = SYSTEM.perf_s()
            greeting.send(CALL, ECHO_HEAD.pack(ECHO) + bytes(size - ECHO_HEAD.size))
            kind, payload = greeting.receive()
            if kind != RESULT or len(payload) != size:
                raise ConnectionError(f"a frame of kind {kind} and {len(payload)} bytes, no echo")
            took.append(SYSTEM.perf_s() - began)
            if took[-1] > _ECHO_S:
                break
        probes.append(Probe(0, 2 * size, max(_LEAST_S, min(took))))
        if min(took) > _ECHO_S:
            break
    return probes


def _listen(address: HelperAddress) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, *_, where = found[0]
        return socket.create_server((where[0], where[1]), family=family, backlog=8)
    except OSError as error:
        raise ConfigError(
            f"SPILLWAY_HOST_SOCKET is '{address}': {error.strerror}; expected an address of this machine, and a port "
            "that is free"
        ) from error
