"""The helper listener in a gpu_worker: a thread that attaches one helper at a time and notices when it has gone."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from common import log
from common.errors import ConfigError
from common.transport.memory_segment import MemorySegment
from engine.host.channel import AttentionChannel, ChannelLayout, ChannelLibrary, HostChannel
from engine.host.handshake import (
    TIMEOUT_S,
    VERSION,
    HelperAttached,
    HelperHello,
    HelperWelcome,
    check_path,
    new_socket,
    receive,
    send,
)

_log = log.get("engine")


class Attachment(NamedTuple):
    """An attached helper: its channel, a socket that is readable once the helper has gone, and how to detach it."""

    channel: AttentionChannel
    watched: socket.socket
    close: Callable[[], None]


class HelperAcceptor(Protocol):
    """A transport by which helpers attach (Unix socket or TCP); it listens as soon as it is made."""

    listener: socket.socket

    def greet(self, connection: socket.socket, layout: ChannelLayout, taken: str) -> Attachment:
        """Attach a helper with this layout, or refuse it with the reason `taken`, if any; OSError says why not."""

    def close(self) -> None:
        """Stop listening."""


class HelperListener:
    """Attaches helpers, one at a time; `channel` is the attached helper's, or None.

    Every helper gets slots of its own, so an abandoned helper cannot write to the next helper's slots.
    """

    def __init__(self, acceptor: HelperAcceptor, layout: ChannelLayout) -> None:
        """Start the thread that accepts helpers."""
        self.channel: AttentionChannel | None = None
        self._acceptor, self._layout = acceptor, layout
        self._attached: Attachment | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(acceptor.listener, selectors.EVENT_READ)
        self._ends, self._end = os.pipe()
        self._selector.register(self._ends, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="host-helpers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Detach the helper, and stop listening."""
        os.close(self._end)
        self._thread.join()
        self._detach()
        self._selector.close()
        self._acceptor.close()
        os.close(self._ends)

    def _run(self) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._ends in ready:
                return
            if self._attached is not None and self._attached.watched in ready:
                self._detach()
            if self._acceptor.listener in ready:
                self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._acceptor.listener.accept()
        except OSError:
            return
        layout = msgspec.structs.replace(self._layout, epoch=self._layout.epoch + 1)
        taken = "" if self._attached is None else "another helper is attached"
        try:
            attached = self._acceptor.greet(connection, layout, taken)
        except OSError as error:
            connection.close()
            _log.warning("host_helper_refused", why=str(error))
            return
        self._layout, self._attached, self.channel = layout, attached, attached.channel
        self._selector.register(attached.watched, selectors.EVENT_READ)
        _log.info("host_helper_attached", epoch=layout.epoch)

    def _detach(self) -> None:
        attached = self._attached
        if attached is None:
            return
        self._attached = self.channel = None
        attached.channel.end()
        self._selector.unregister(attached.watched)
        attached.close()
        _log.warning("host_helper_gone", epoch=attached.channel.layout.epoch)


class UnixAcceptor:
    """Attaches processes of this machine, which receive the pages as a file descriptor (see `HelperAcceptor`)."""

    def __init__(self, path: str, library: ChannelLibrary, pages: MemorySegment) -> None:
        """Listen for helpers that attend to `pages`; ConfigError if the socket cannot be bound."""
        self._library, self._pages = library, pages
        pages.seal(read_only=True)
        self._path = Path(check_path(path))
        self.listener = _listen(self._path)

    def greet(self, connection: socket.socket, layout: ChannelLayout, taken: str) -> Attachment:
        """Attach a helper with this layout, or refuse it with the reason `taken`, if any; OSError says why not."""
        connection.settimeout(TIMEOUT_S)
        hello, _ = receive(connection, HelperHello)
        if why := self._against(hello) or taken:
            send(connection, HelperWelcome(refusal=why))
            raise PermissionError(why)
        slots = MemorySegment(self._library.slot_bytes(layout), large=False)
        slots.seal(read_only=False)
        channel = HostChannel(self._library, layout, slots.memory, self._pages.memory, owner=True)
        send(connection, HelperWelcome(layout), [self._pages.file, slots.file])
        answer, _ = receive(connection, HelperAttached)
        if answer.failure:
            raise OSError(answer.failure)
        # A helper sends nothing after the handshake: the socket becomes readable only when the connection ends.
        return Attachment(channel, connection, connection.close)

    def close(self) -> None:
        """Stop listening."""
        self.listener.close()
        self._path.unlink(missing_ok=True)

    def _against(self, hello: HelperHello) -> str:
        """Return why a helper cannot be attached; empty if it can."""
        if hello.version != VERSION:
            return f"it speaks version {hello.version} of the handshake; expected {VERSION}"
        return self._library.against(hello.digest)


def _listen(path: Path) -> socket.socket:
    """Return a socket that listens at a path, for this user only; ConfigError if another process does."""
    made = new_socket()
    try:
        with suppress(ConnectionRefusedError, FileNotFoundError):
            made.connect(str(path))
            raise ConfigError(
                f"SPILLWAY_HOST_SOCKET is {str(path)!r}: another process listens there; expected a path of its own"
            )
        made.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            path.unlink()  # the socket's process has died
        made = new_socket()
        made.settimeout(None)
        made.bind(str(path))
        path.chmod(0o600)
        made.listen(8)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"SPILLWAY_HOST_SOCKET is {str(path)!r}: {error.strerror}; expected a path where a socket can be made"
        ) from error
    except BaseException:
        made.close()
        raise
    return made
