"""The heartbeat thread: renews heartbeat keys each second while the compute loops make progress.

The thread has its own connection, so that a worker with a busy event loop does not look dead. A worker with a hung
compute loop must look dead: a heartbeat whose step is overdue is not renewed, and the worker loses its leases.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from common import log
from common.clock import SYSTEM
from common.redis.address import RedisAddress

TTL_MS = 5000
EVERY_S = 1.0
OVERDUE_S = 10.0
_REPLY_S, _CONNECT_S = 2.0, 1.0
_log = log.get("bus")


class Heartbeat:
    """One worker's sign of life; `overdue` compares the running step with its predicted time."""

    def __init__(self, key: str, now: Callable[[], float] = SYSTEM.monotonic) -> None:
        self.key = key
        self._now = now
        self._limit: float | None = None
        self._turned = now()
        self.lost = threading.Event()

    def working(self, predicted_s: float) -> None:
        """Record that a step has begun; it is overdue after 5 * `predicted_s`, or 10 s if that is longer."""
        self._limit = self._now() + max(OVERDUE_S, 5 * predicted_s)

    def idle(self) -> None:
        """Record that no step is running, so that none can be overdue."""
        self._limit = None

    def turn(self) -> None:
        """Record that the worker's event loop has turned."""
        self._turned = self._now()

    @property
    def overdue(self) -> bool:
        """True if the running step takes far longer than predicted, or the event loop hangs outside steps."""
        limit = self._limit
        if limit is None:
            limit = self._turned + OVERDUE_S
        return self._now() > limit


class HeartbeatThread:
    """The thread of a process that renews every pulse's key; a pulse whose key is gone is marked lost."""

    def __init__(self, address: RedisAddress) -> None:
        self._pulses: set[Heartbeat] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._address = address
        self._thread: threading.Thread | None = None

    def add(self, pulse: Heartbeat) -> None:
        """Renew `pulse` from now on."""
        with self._lock:
            self._pulses.add(pulse)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
                self._thread.start()

    def remove(self, pulse: Heartbeat) -> None:
        """Stop renewing `pulse`; its key lapses."""
        with self._lock:
            self._pulses.discard(pulse)

    def stop(self) -> None:
        """End the thread (waits for at most its socket timeout)."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=3)

    def _run(self) -> None:
        client: Any = None
        while not self._stop.wait(EVERY_S):
            with self._lock:
                pulses = [p for p in self._pulses if not p.overdue]
            client = self._renew(client, pulses)
        self._close(client)

    def _renew(self, client: Any, pulses: list[Heartbeat]) -> Any:
        """Renew every pulse; return the client for the next round, or None after a failure."""
        failed = False
        for pulse in pulses:
            try:
                client = client or self._address.thread_client(
                    timeout_s=_REPLY_S, connect_s=_CONNECT_S
                )
                if not client.pexpire(pulse.key, TTL_MS):
                    pulse.lost.set()
            except (RedisError, OSError):
                failed = True
            except Exception:  # noqa: BLE001 - without this thread every lease of the process is lost
                failed = True
                _log.exception("heart_failed", key=pulse.key)
            if failed and not self._address.cluster:
                break  # in a Cluster other nodes may still answer
        if failed:
            self._close(client)
            return None
        return client

    @staticmethod
    def _close(client: Any) -> None:
        if client is not None:
            with contextlib.suppress(Exception):
                client.close()
