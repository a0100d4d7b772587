"""Ask a process from outside: HTTP status, metrics, PING."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path


class MeshError(Exception):
    """A process did not start, did not become ready, or is not known by that name."""


@contextlib.asynccontextmanager
async def _asked(
    opening: Coroutine[None, None, tuple[StreamReader, StreamWriter]], request: str
) -> AsyncIterator[StreamReader]:
    """Send a request over a new connection, which is closed even when the time for the answer runs out."""
    reader, writer = await opening
    try:
        writer.write(request.encode())
        yield reader
    finally:
        writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _get(host: str, port: int, path: str) -> contextlib.AbstractAsyncContextManager[StreamReader]:
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    return _asked(asyncio.open_connection(host, port), request)


async def http_status(host: str, port: int, path: str, timeout_s: float = 2.0) -> int:
    """GET a path and return the status; 0 if nothing answers in time."""
    try:
        async with asyncio.timeout(timeout_s):
            async with _get(host, port, path) as reader:
                line = await reader.readline()
        return int(line.split()[1]) if line.startswith(b"HTTP/") else 0
    except (OSError, TimeoutError, IndexError, ValueError):
        return 0


async def text(host: str, port: int, path: str, timeout_s: float = 5.0) -> str:
    """GET a path and return its body; empty if nothing answers 200 in time."""
    try:
        async with asyncio.timeout(timeout_s):
            async with _get(host, port, path) as reader:
                found = (await reader.read()).decode("utf-8", "replace")
    except (OSError, TimeoutError):
        return ""
    head, _, body = found.partition("\r\n\r\n")
    return body if " 200 " in head.partition("\r\n")[0] else ""


async def metrics(port: int) -> dict[str, float]:
    """Return every sample of a process' /metrics by name and labels; empty if it does not answer."""
    found = {}
    for line in (await text("127.0.0.1", port, "/metrics")).splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            with contextlib.suppress(ValueError):
                found[name] = float(value)
    return found


async def answers_ping(path: Path) -> bool:
    """Tell whether a Redis on this Unix socket answers PING within 2 s."""
    try:
        async with asyncio.timeout(2.0):
            opening = asyncio.open_unix_connection(str(path))
            async with _asked(opening, "PING\r\n") as reader:
                line = await reader.readline()
        return line == b"+PONG\r\n"
    except (OSError, TimeoutError):
        return False


async def until_unready(port: int) -> None:
    """Return as soon as /readyz on this port answers anything but 200, or nothing."""
    while await http_status("127.0.0.1", port, "/readyz", 1.0) == 200:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
