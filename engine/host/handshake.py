"""The handshake by which a helper attaches to a gpu_worker over a Unix socket: messages and file descriptors.

The helper introduces itself; the worker answers with the layout and the descriptors of its pages and of new slots, or
with a refusal; the helper confirms that it has mapped both. The connection stays open as long as the attachment lasts.
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
_LONGEST_PATH = 107  # bytes that a Unix socket's address has room for
Message = TypeVar("Message", bound=msgspec.Struct)


class HelperHello(msgspec.Struct, frozen=True):
    """The helper's first message; `digest` is the hash of its native library."""

    version: int
    digest: str
    pid: int


class HelperWelcome(msgspec.Struct, frozen=True):
    """The gpu_worker's answer: a layout, with the descriptors of pages and slots, or the reason of its `refusal`."""

    layout: ChannelLayout | None = None
    refusal: str = ""


class HelperAttached(msgspec.Struct, frozen=True):
    """The helper's confirmation that it has mapped pages and slots, or its `failure`."""

    failure: str = ""


def new_socket() -> socket.socket:
    """Return a socket for the handshake, with a limit on every wait."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(TIMEOUT_S)
    return made


def check_path(path: str) -> str:
    """Return a path if it fits a socket's address; ConfigError if it is too long."""
    found = str(Path(path).resolve())
    if len(os.fsencode(found)) > _LONGEST_PATH:
        raise ConfigError(
            f"SPILLWAY_HOST_SOCKET is {path!r}: {found} is too long for a socket; expected at most "
            f"{_LONGEST_PATH} bytes"
        )
    return found


def send(connection: socket.socket, message: msgspec.Struct, files: Sequence[int] = ()) -> None:
    """Send one message with file descriptors; OSError if the other side has gone or does not read."""
    socket.send_fds(connection, [msgspec.msgpack.encode(message)], list(files))


def receive(
    connection: socket.socket, kind: type[Message], files: int = 0
) -> tuple[Message, list[int]]:
    """Return one message and at most `files` descriptors, which the caller closes.

    OSError if the other side has gone, is silent, or sends another message.
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
