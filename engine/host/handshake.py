"""Messages by which a helper attaches to a gpu_worker, at a Unix socket, and the descriptors that go with them.

The helper says who it is; the worker answers with the layout and the descriptors of its pages and of new slots, or with
a refusal; the helper says that it has mapped them. The connection stays: its end is the end of the attachment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from common.errors import ConfigError
from engine.host.channel import ChannelLayout

VERSION = 2
TIMEOUT_S = 5.0
_MOST = 1 << 16
_LONGEST_PATH = 107  # what a Unix socket's address has room for
Message = TypeVar("Message", bound=msgspec.Struct)


class HelperHello(msgspec.Struct, frozen=True):
    """What a helper says first; `digest` is the hash of its native library."""

    version: int
    digest: str
    pid: int


class HelperWelcome(msgspec.Struct, frozen=True):
    """What a gpu_worker answers, with the descriptors of its pages and of the slots: or `refusal` says why not."""

    layout: ChannelLayout | None = None
    refusal: str = ""


class HelperAttached(msgspec.Struct, frozen=True):
    """What a helper says when it has mapped everything, or `failure` says why it could not."""

    failure: str = ""


def new_socket() -> socket.socket:
    """Return a socket for the handshake, with a limit on every wait."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(TIMEOUT_S)
    return made


def check_path(path: str) -> str:
    """Return a path as a socket's address takes it; ConfigError if it is too long."""
    found = str(Path(path).resolve())
    if len(os.fsencode(found)) > _LONGEST_PATH:
        raise ConfigError(
            f"SPILLWAY_HOST_SOCKET is {path!r}: {found} is too long for a socket; expected at most "
            f"{_LONGEST_PATH} bytes"
        )
    return found


def send(connection: socket.socket, message: msgspec.Struct, files: Sequence[int] = ()) -> None:
    """Send one message, and descriptors of files; OSError if the other side has gone or does not read."""
    socket.send_fds(connection, [msgspec.msgpack.encode(message)], list(files))


def receive(
    connection: socket.socket, kind: type[Message], files: int = 0
) -> tuple[Message, list[int]]:
    """Return one message and its descriptors, at most so many, which are the caller's to close.

    OSError if the other side has gone, is silent, or sends something else.
    """
    data, found, _, _ = socket.recv_fds(connection, _MOST, files)
    if not data:
        raise ConnectionResetError("the other side has gone")
    try:
        return msgspec.msgpack.decode(data, type=kind), found
    except msgspec.MsgspecError as error:
        for file in found:
            os.close(file)
        raise ConnectionError(f"no message of a handshake: {error}") from error
