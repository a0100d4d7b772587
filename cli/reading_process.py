"""The command's side of the process that reads documents: limits time and memory, replaces a failed process."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from cli.readers.reading import Reading, Textless, Unreadable

MEMORY_BYTES = 1024 * 1024 * 1024
LIMIT_S = 120.0
_MAX_ANSWER_BYTES = 512 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024


class ReadingProcess:
    """Reads documents, one at a time, in a separate process, which starts with the first one.

    `limit_s` bounds the seconds of each file, `memory_bytes` the process' address space. A file that exceeds a bound or
    crashes the process is Unreadable, and the next file gets a new process. `clock` counts seconds.
    """

    def __init__(
        self,
        limit_s: float = LIMIT_S,
        memory_bytes: int = MEMORY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._memory_bytes, self._clock = limit_s, memory_bytes, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process' id; None while no process runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process, if there is one: a read in another thread fails, and no more documents are read."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is not None:
            process.kill()  # a waiting thread sees the closed socket
            process.wait()
        if connection is not None:
            connection.close()

    def read(self, descriptor: int, kind: str) -> Reading:
        """Return the text of an open file of a kind ("pdf", "docx", "pptx", "html", "text"); Unreadable otherwise."""
        until_s = self._clock() + self._limit_s
        try:
            answer = self._ask(descriptor, kind, until_s)
        except TimeoutError:
            self._end()
            raise Unreadable(f"not read within {self._limit_s:g} s (--file-timeout)") from None
        except (OSError, ValueError) as error:
            self._end()
            raise Unreadable(
                "damaged, or it takes more memory than is allowed: the process that read it ended"
            ) from error
        if answer.get("spent"):
            self._end()
        if "textless" in answer:
            raise Textless(answer["textless"])
        if "unreadable" in answer:
            raise Unreadable(answer["unreadable"])
        return Reading(**answer["reading"])

    def _ask(self, descriptor: int, kind: str, until_s: float) -> dict[str, Any]:
        os.lseek(descriptor, 0, os.SEEK_SET)
        connection = self._connection or self._begin()
        connection.settimeout(self._left(until_s))
        socket.send_fds(connection, [json.dumps({"kind": kind}).encode()], [descriptor])
        size = int.from_bytes(self._receive(connection, 8, until_s))
        if size > _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        answer: dict[str, Any] = json.loads(self._receive(connection, size, until_s))
        return answer

    def _left(self, until_s: float) -> float:
        left_s = until_s - self._clock()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _receive(self, connection: socket.socket, size: int, until_s: float) -> bytes:
        held = bytearray()
        while len(held) < size:
            connection.settimeout(self._left(until_s))
            piece = connection.recv(min(size - len(held), _PIECE_BYTES))
            if not piece:
                raise ConnectionResetError
            held += piece
        return bytes(held)

    def _begin(self) -> socket.socket:
        if self._closed:
            raise ConnectionAbortedError
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), str(self._memory_bytes), str(math.ceil(self._limit_s))]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cli.readers", *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = ours
        return ours
