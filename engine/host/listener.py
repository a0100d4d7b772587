"""The gpu_worker's side of attaching: a thread that lets one helper at a time have the pages, and notices its end."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from common import log
from common.errors import ConfigError
from common.transport.memory_segment import MemorySegment
from engine.host.channel import ChannelLayout, ChannelLibrary, HostChannel
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


class HelperListener:
    """Listens at a Unix socket; `channel` is that of the helper that is attached, None without one.

    Every helper gets slots of its own, so one that was given up changes nothing of the next one's.
    """

    def __init__(
        self,
        path: str,
        library: ChannelLibrary,
        layout: ChannelLayout,
        pages: MemorySegment,
    ) -> None:
        """Listen, for helpers that attend to `pages`; ConfigError if the socket cannot be had."""
        self.channel: HostChannel | None = None
        self._library, self._layout, self._pages = library, layout, pages
        pages.seal(read_only=True)
        self._path = Path(check_path(path))
        self._listener = _listen(self._path)
        self._helper: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
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
        self._listener.close()
        os.close(self._ends)
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._ends in ready:
                return
            if self._helper in ready:
                self._detach()  # a helper says nothing after the handshake: this is its end
            if self._listener in ready:
                self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.settimeout(TIMEOUT_S)
        try:
            self._greet(connection)
        except OSError as error:
            connection.close()
            _log.warning("host_helper_refused", why=str(error))

    def _greet(self, connection: socket.socket) -> None:
        """Attach a helper; OSError with the reason if it is refused or does not come so far."""
        hello, _ = receive(connection, HelperHello)
        why = self._against(hello)
        if why:
            send(connection, HelperWelcome(refusal=why))
            raise PermissionError(why)
        layout = msgspec.structs.replace(self._layout, epoch=self._layout.epoch + 1)
        slots = MemorySegment(self._library.slot_bytes(layout), large=False)
        slots.seal(read_only=False)
        channel = HostChannel(self._library, layout, slots.memory, self._pages.memory, owner=True)
        send(connection, HelperWelcome(layout), [self._pages.file, slots.file])
        answer, _ = receive(connection, HelperAttached)
        if answer.failure:
            raise OSError(answer.failure)
        self._layout, self._helper, self.channel = layout, connection, channel
        self._selector.register(connection, selectors.EVENT_READ)
        _log.info("host_helper_attached", pid=hello.pid, epoch=layout.epoch)

    def _against(self, hello: HelperHello) -> str:
        """Return why a helper cannot be attached, or nothing."""
        if hello.version != VERSION:
            return f"it speaks version {hello.version} of the handshake; expected {VERSION}"
        if hello.digest != self._library.digest:
            return (
                f"its native library is {hello.digest}, this worker's is {self._library.digest}; "
                "expected the same build on both sides"
            )
        return "" if self._helper is None else "another helper is attached"

    def _detach(self) -> None:
        helper, channel = self._helper, self.channel
        if helper is None or channel is None:
            return
        self._helper = self.channel = None
        channel.end()
        self._selector.unregister(helper)
        helper.close()
        _log.warning("host_helper_gone", epoch=channel.layout.epoch)


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
