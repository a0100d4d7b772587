"""The heartbeat thread outlives whatever a server may answer."""

from __future__ import annotations

import contextlib
import socket
import threading

from common.redis.address import RedisAddress
from common.redis.heartbeat import Heartbeat, HeartbeatThread


def _answer_nonsense(listener: socket.socket, asked: threading.Semaphore) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        asked.release()
        with connection, contextlib.suppress(OSError):  # it is closed with replies unread
            while connection.recv(4096):
                connection.sendall(b":no number\r\n" * 8)


def test_the_thread_goes_on_after_a_reply_that_is_none() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    asked = threading.Semaphore(0)
    threading.Thread(target=_answer_nonsense, args=(listener, asked), daemon=True).start()
    heart = HeartbeatThread(
        RedisAddress(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", cluster=False, setting="")
    )
    try:
        heart.add(
            Heartbeat("{f/0}:heart:w", now=lambda: 0.0)
        )  # never overdue, however slow the machine
        for _ in range(3):  # each beat on a new connection: the thread lives
            assert asked.acquire(timeout=60)
        thread = heart._thread
        assert thread is not None
        assert thread.is_alive()
    finally:
        heart.stop()
        listener.close()
