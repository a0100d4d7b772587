"""Connections to one SQLite file: one opener, and a pool of readers."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def connect(path: Path) -> sqlite3.Connection:
    """Open a database so that readers never wait for the writer and a crash never breaks it."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA cache_size=-16384")
    return connection


class Readers:
    """Connections lent to whoever reads; as many as ever read at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection; sqlite3.ProgrammingError once closed."""
        with self._lock:
            if self._closed:
                raise sqlite3.ProgrammingError("the store is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = connect(self._path)
        try:
            yield connection
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def close(self) -> None:
        """Lend no more; those at work finish first."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
