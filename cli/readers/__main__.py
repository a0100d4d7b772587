"""The process that reads documents: takes open files over a socket, one at a time, and answers each with its text.

It writes no file, holds no more memory than it was given, and ends by itself when a file takes too long.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from cli.readers.reading import Reading, Textless, Unreadable

MAX_ORDER_BYTES = 4096
_GRACE_S = 5


def _pdf(file: BinaryIO) -> Reading:
    from cli.readers.pdf import read_pdf  # noqa: PLC0415 - loaded by the first PDF

    return read_pdf(file)


def _docx(file: BinaryIO) -> Reading:
    from cli.readers.word_document import read_word_document  # noqa: PLC0415

    return read_word_document(file)


def _pptx(file: BinaryIO) -> Reading:
    from cli.readers.slides import read_slides  # noqa: PLC0415

    return read_slides(file)


def _html(file: BinaryIO) -> Reading:
    from cli.readers.plain_text import decoded  # noqa: PLC0415
    from cli.readers.web_page import read_web_page  # noqa: PLC0415

    text, encoding = decoded(file.read())
    page = read_web_page(text)
    return Reading(page.text, page.title, encoding=encoding)


def _text(file: BinaryIO) -> Reading:
    from cli.readers.plain_text import read_plain_text  # noqa: PLC0415

    return read_plain_text(file.read())


READERS: dict[str, Callable[[BinaryIO], Reading]] = {
    "pdf": _pdf,
    "docx": _docx,
    "pptx": _pptx,
    "html": _html,
    "text": _text,
}


def _answer(kind: str, descriptor: int) -> dict[str, Any]:
    try:
        with os.fdopen(descriptor, "rb") as file:
            return {"reading": asdict(READERS[kind](file))}
    except Textless as error:
        return {"textless": str(error)}
    except Exception as error:  # noqa: BLE001 - a malformed file may raise any error
        return {"unreadable": _why(error), "spent": _spent()}


def _why(error: Exception) -> str:
    if isinstance(error, MemoryError) or _spent():  # parsers turn a MemoryError into other errors
        return "it takes more memory than is allowed"
    if isinstance(error, Unreadable):
        return str(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"damaged ({type(error).__name__})"


def _spent() -> bool:
    """Return whether this process is near the bound of its memory."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = re.search(r"VmPeak:\s+([0-9]+) kB", status)
    return most != resource.RLIM_INFINITY and peak is not None and 1024 * int(peak[1]) > 0.9 * most


def bound(memory_bytes: int) -> None:
    """Bound this process: limit its memory, and forbid writing files and core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(connection: socket.socket, limit_s: int) -> None:
    """Read the requested documents until the other end closes the socket."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(connection, MAX_ORDER_BYTES, 1)
        if not order:
            return
        signal.alarm(
            limit_s + _GRACE_S
        )  # ends this process even if a library hangs and no parent is left
        answer = _answer(json.loads(order)["kind"], descriptors[0])
        body = json.dumps(answer).encode()
        connection.sendall(len(body).to_bytes(8) + body)
        signal.alarm(0)


def main(words: list[str]) -> None:
    """Serve on an inherited socket: its descriptor, the memory in bytes and the seconds for a file."""
    descriptor, memory_bytes, limit_s = map(int, words)
    bound(memory_bytes)
    with socket.socket(fileno=descriptor) as connection:
        serve(connection, limit_s)


if __name__ == "__main__":
    main(sys.argv[1:])
