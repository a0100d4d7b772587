"""The way of an embedding with nothing done on it: what it costs a machine to wake the same processes in turn.

A router takes a request's bytes and pushes its number to a list in Redis; a worker pops the number, hands it to a
thread that sleeps for as long as a device would compute, and pushes it to a second list; the router pops it and
answers. So the sockets, processes and threads are those of the mesh, in the same order, with a few lines between them.
`python -m bench.mesh.bare_hops router SOCKET` and `… worker SOCKET SECONDS` are the two processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, cast

import hiredis
import uvloop

from bench import ROOT
from bench.mesh import proc

_WORK, _DONE = b"bare:work", b"bare:done"
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
_LENGTH = b"\r\nContent-Length: "


@contextlib.asynccontextmanager
async def bare_hops(socket: str, device_s: float) -> AsyncIterator[str]:
    """Start both processes on the Redis at a socket; yields the router's URL, and ends them with the block."""
    router = await _started("router", socket)
    worker = await _started("worker", socket, str(device_s))
    try:
        assert router.stdout is not None
        port = int(await router.stdout.readline())
        yield f"http://127.0.0.1:{port}"
    finally:
        for each in (router, worker):
            each.kill()
            await each.wait()


async def _started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.mesh.bare_hops", *arguments, cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, preexec_fn=proc.die_with_parent,
    )  # fmt: skip


def _command(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


class _Pusher(asyncio.Protocol):
    """Pushes numbers to a list of Redis."""

    def __init__(self) -> None:
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def push(self, name: bytes, number: bytes) -> None:
        """Send a number."""
        self._transport.write(_command(b"LPUSH", name, number))


class _Popper(asyncio.Protocol):
    """Waits for numbers in a list of Redis, and gives each to `took`."""

    def __init__(self, name: bytes, took: Callable[[bytes], None]) -> None:
        self._pop, self._took = _command(b"BRPOP", name, b"0"), took
        self._replies = hiredis.Reader()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self._pop)

    def data_received(self, data: bytes) -> None:
        self._replies.feed(data)
        while (reply := self._replies.gets()) is not False:
            self._transport.write(self._pop)
            self._took(reply[1])


class _Client(asyncio.Protocol):
    """A client's connection: `came` gets its transport for each whole request."""

    def __init__(self, came: Callable[[asyncio.Transport], None]) -> None:
        self._came, self._held = came, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, _, body = self._held.partition(b"\r\n\r\n")
        size = int(head.partition(_LENGTH)[2].split(b"\r\n")[0] or b"0")
        if len(body) >= size and self._transport is not None:
            self._held = body[size:]
            self._came(self._transport)


async def _connected(
    socket: str, took: Callable[[bytes], None], name: bytes
) -> tuple[_Pusher, _Popper]:
    loop = asyncio.get_running_loop()
    _, pusher = await loop.create_unix_connection(_Pusher, socket)
    _, popper = await loop.create_unix_connection(partial(_Popper, name, took), socket)
    return pusher, popper


async def _router(socket: str) -> None:
    """Answer each request once its number has come back."""
    waiting: dict[bytes, asyncio.Transport] = {}
    numbers = itertools.count()

    def came(client: asyncio.Transport) -> None:
        number = b"%d" % next(numbers)
        waiting[number] = client
        pusher.push(_WORK, number)

    pusher, _popper = await _connected(
        socket, lambda number: waiting.pop(number).write(_ANSWER), _DONE
    )
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(partial(_Client, came), "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


async def _worker(socket: str, device_s: float) -> None:
    """Send each number back from a thread that takes all that wait, and sleeps."""
    loop = asyncio.get_running_loop()
    taken: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    pusher, _popper = await _connected(socket, taken.put, _WORK)

    def device() -> None:
        while True:
            batch = [taken.get()]
            while not taken.empty():
                batch.append(taken.get())
            time.sleep(device_s)
            loop.call_soon_threadsafe(ended, batch)

    def ended(batch: list[bytes]) -> None:
        for number in batch:
            pusher.push(_DONE, number)

    threading.Thread(target=device, daemon=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    role, where, *more = sys.argv[1:]
    uvloop.run(_router(where) if role == "router" else _worker(where, float(more[0])))
