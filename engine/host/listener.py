"""The gpu_worker's side of attaching: a thread that lets one helper at a time have the pages, and notices its end."""

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
    """A helper that is attached: its channel, a socket that is readable once it has gone, and what lets it go."""

    channel: AttentionChannel
    watched: socket.socket
    close: Callable[[], None]


class HelperAcceptor(Protocol):
    """A kind of way by which helpers attach; it listens from its making on."""

    listener: socket.socket

    def greet(self, connection: socket.socket, layout: ChannelLayout, taken: str) -> Attachment:
        """Attach a helper with a layout, unless `taken` says why not; OSError says why nothing came of it."""

    def close(self) -> None:
        """Listen no longer."""


class HelperListener:
    """Lets helpers attach, one at a time; `channel` is that of the helper that is attached, None without one.

    Every helper gets slots of its own, so one that was given up changes nothing of the next one's.
    """

    def __init__(self, acceptor: HelperAcceptor, layout: ChannelLayout) -> None:
        """Take helpers from now on."""
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
        """Let the helper go, and listen no longer."""
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
    """Lets processes of this machine attach, which get the pages as a descriptor (see `HelperAcceptor`)."""

    def __init__(self, path: str, library: ChannelLibrary, pages: MemorySegment) -> None:
        """Listen, for helpers that attend to `pages`; ConfigError if the socket cannot be had."""
        self._library, self._pages = library, pages
        pages.seal(read_only=True)
        self._path = Path(check_path(path))
        self.listener = _listen(self._path)

    def greet(self, connection: socket.socket, layout: ChannelLayout, taken: str) -> Attachment:
        """Attach a helper with a layout, unless `taken` says why not; OSError says why nothing came of it."""
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
        # A helper says nothing after the handshake: what can be read is its end.
        return Attachment(channel, connection, connection.close)

    def close(self) -> None:
        """Listen no longer."""
        self.listener.close()
        self._path.unlink(missing_ok=True)

    def _against(self, hello: HelperHello) -> str:
        """Return why a helper cannot be attached, or nothing."""
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
            path.unlink()  # of a process that has died
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
