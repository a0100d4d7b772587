"""An HTTP client for load, with the least CPU per request that aiohttp allows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from loadgen.bodies import Request


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """The answer to a request: status (0: no HTTP answer), the error's code if any, body, and the request's id."""

    status: int
    code: str
    body: bytes
    request_id: str = ""


class Target:
    """Sends requests to one or more routers in turn; use as `async with Target(urls) as target`."""

    def __init__(
        self,
        urls: list[str],
        *,
        key: str = "",
        timeout_s: float = 60.0,
        headers: dict[str, str] | None = None,
        connections: int = 0,
    ) -> None:
        self._urls = urls
        self._next = 0
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._connections = connections
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=60.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            timeout=self._timeout,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request, headers: dict[str, str] | None = None) -> TargetAnswer:
        """POST one request and read its whole answer; no retries, no exceptions."""
        if self._session is None:
            raise RuntimeError("Target is used outside its `async with`")
        self._next = (self._next + 1) % len(self._urls)
        url = self._urls[self._next] + request.path
        try:
            async with self._session.post(url, data=request.body, headers=headers) as response:
                body = await response.read()
                status = response.status
                name = response.headers.get("x-request-id", "")
        except TimeoutError:
            return TargetAnswer(0, "client_timeout", b"")
        except (aiohttp.ClientError, OSError) as error:
            return TargetAnswer(0, type(error).__name__, b"")
        return TargetAnswer(status, _code(body) if status >= 400 else "", body, name)


def _code(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "no_error_body"


async def idle_connections(url: str, count: int) -> list[asyncio.StreamWriter]:
    """Open `count` keep-alive connections that send one GET /livez and then stay silent."""
    host, _, port = url.removeprefix("http://").partition(":")
    writers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /livez HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        writers.append(writer)
    return writers
