"""The host helper: attaches to the gpu_worker at a Unix socket, and attends to the rows that the worker hands over."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from common.errors import ConfigError
from common.transport.memory_segment import attach
from engine.host.channel import ChannelLibrary, HostChannel
from engine.host.handshake import (
    VERSION,
    HelperAttached,
    HelperHello,
    HelperWelcome,
    check_path,
    new_socket,
    receive,
    send,
)


class HostHelper:
    """An attachment to a gpu_worker's pages, which are mapped read-only."""

    def __init__(self, path: str, library: ChannelLibrary) -> None:
        """Attach; OSError if no worker listens or memory is short, ConfigError if the worker refuses this build."""
        self.connection = new_socket()
        try:
            self.connection.connect(check_path(path))
            self.channel = _attach(self.connection, library)
        except BaseException:
            self.connection.close()
            raise
        self.connection.settimeout(None)

    def serve(self, threads: int, slowdown: int = 1) -> int:
        """Attend until the worker has gone or `stop` is called; return how many layers were done in time."""
        watching = threading.Thread(target=self._watch, name="gpu-worker-end", daemon=True)
        watching.start()
        try:
            return self.channel.serve(threads, slowdown)
        finally:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            watching.join()

    def _watch(self) -> None:
        """Make `serve` return once the worker has gone: the connection becomes readable only when it ends."""
        with suppress(OSError):
            self.connection.recv(1)
        self.channel.stop()

    def stop(self) -> None:
        """Make `serve` return; any thread may call this."""
        self.channel.stop()

    def close(self) -> None:
        """End the attachment, after `serve` has returned."""
        self.connection.close()


def _attach(connection: socket.socket, library: ChannelLibrary) -> HostChannel:
    send(connection, HelperHello(VERSION, library.digest, os.getpid()))
    welcome, files = receive(connection, HelperWelcome, files=2)
    try:
        if welcome.layout is None:
            raise ConfigError(f"the gpu_worker refuses this helper: {welcome.refusal}")
        if len(files) != 2:
            raise ConnectionError("the gpu_worker sent no descriptors; expected two")
        layout = welcome.layout
        pages = attach(files[0], layout.page_bytes, writable=False)
        slots = attach(files[1], library.slot_bytes(layout), writable=True)
        channel = HostChannel(library, layout, slots, pages, owner=False)
        if channel.epoch != layout.epoch:
            raise ConnectionError(
                f"the slots are of attachment {channel.epoch}; expected {layout.epoch}"
            )
        send(connection, HelperAttached())
    except OSError as error:
        with suppress(OSError):
            send(connection, HelperAttached(failure=str(error)))
        raise
    finally:
        for file in files:
            os.close(file)
    return channel
