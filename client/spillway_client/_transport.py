"""One HTTP call with its deadline, its retries and its idempotency key; resources build on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl as ssl_module
import time
import uuid
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
from yarl import URL

from . import errors, retry
from ._http import (
    BROKEN,
    Answer,
    Call,
    RetryableError,
    Servers,
    answer_of,
    checked_timeout,
    encode,
    error_of,
    sentence,
)

log = logging.getLogger("spillway_client")
CONNECT_S = 5.0
CANCEL_S = 2.0
CANCEL_TASK = "spillway-cancel"
TIMEOUT_S, GENERATION_TIMEOUT_S = 60.0, 600.0
T = TypeVar("T")


class Transport:
    """Owns the connections; its `call` raises only this package's errors."""

    def __init__(
        self,
        base_urls: str | Sequence[str],
        api_key: str | None,
        *,
        timeout_s: float | None,
        max_retries: int,
        resume_s: float,
        max_connections: int,
        ssl: ssl_module.SSLContext | bool,
    ) -> None:
        self.servers = Servers(base_urls)
        self._timeout_s = None if timeout_s is None else checked_timeout(timeout_s)
        if max_retries < 0:
            raise errors.InvalidInputError(f"max_retries is {max_retries}; expected 0 or more")
        if not 0 <= resume_s <= 300:
            raise errors.InvalidInputError(f"resume_s is {resume_s}; expected 0 to 300")
        self.resume_s = resume_s
        self._max_retries = max_retries
        self._max_connections = max_connections
        self._ssl = ssl
        self._session: aiohttp.ClientSession | None = None
        self._cancels: set[asyncio.Task[None]] = set()
        self._leaving: weakref.WeakSet[Any] = weakref.WeakSet()
        self._headers = {"Accept": "application/json", "Spillway-Resume": f"{resume_s:g}"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise errors.InvalidInputError(
                    "api_key contains characters an HTTP header cannot hold"
                )
            self._headers["Authorization"] = f"Bearer {api_key}"

    def open(self) -> aiohttp.ClientSession:
        """Return the session, made at first use inside the running loop."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, ssl=self._ssl),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                middlewares=(_once,),
            )
        return self._session

    async def close(self) -> None:
        """Close all connections, after the server was told of cancelled calls and unread streams; idempotent."""
        for stream in list(self._leaving):
            stream.leave()
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=CANCEL_S)
        if self._session is not None:
            await self._session.close()

    # -- calls -------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        reads: bool = False,
    ) -> Answer:
        """Make one call; `timeout_s` covers all its tries and is the request's deadline at the server.

        A POST has one idempotency key for all its tries, so a retry attaches to the work of an earlier try and never
        repeats it. A POST that only `reads` has no key, and the server does not keep it: it answers sooner, and a retry
        computes again. Raises the classes of `spillway_client.errors`.
        """
        key = (idempotency_key or uuid.uuid4().hex) if method == "POST" and not reads else None
        call = self.prepared(
            method,
            path,
            body=body,
            query=query,
            headers={"Spillway-Resume": "0"} if reads else None,
            timeout_s=timeout_s,
            idempotency_key=key,
        )
        work = key is not None and not path.startswith("/v1/requests/")
        try:
            async with self.cancelling(key if work else None):
                return await self.tries(call, answer_of)
        except _DoneBefore:
            return Answer({}, None)

    def prepared(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        default_s: float = TIMEOUT_S,
        idempotency_key: str | None = None,
    ) -> Call:
        """Return a checked and encoded call, whose deadline begins now."""
        if timeout_s is None:
            limit_s = default_s if self._timeout_s is None else self._timeout_s
        else:
            limit_s = checked_timeout(timeout_s)
        merged = {**self._headers, **(headers or {})}
        if idempotency_key is not None:
            merged["Idempotency-Key"] = idempotency_key
        data = None if body is None else encode(body)
        if data is not None:
            merged["Content-Type"] = "application/json"
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = path + (f"?{urlencode(given)}" if given else "")
        return Call(method, target, data, merged, time.monotonic() + limit_s)

    async def tries(self, call: Call, take: Callable[[aiohttp.ClientResponse], Awaitable[T]]) -> T:
        """Send a call until an answer succeeds; return the result of `take` for it."""
        unclear, attempt, others = False, 0, len(self.servers.all) - 1
        while True:
            base, last = self.servers.now, attempt >= self._max_retries
            error: errors.SpillwayError
            wait_s: float | None = None
            try:
                return await self.attempt(call, base, take)
            except errors.APITimeoutError:
                raise
            except errors.APIConnectionError as broken:
                unclear, error, elsewhere = True, broken, True
            except RetryableError as refused:
                error, wait_s = refused.error, refused.error.retry_after_s
                elsewhere = isinstance(error, errors.UnavailableError)
            except errors.NotFoundError:
                if call.method == "DELETE" and unclear:
                    raise _DoneBefore from None  # an earlier try succeeded, and its answer was lost
                raise
            if elsewhere:
                self.servers.leave(base)
                if others > 0:  # another router may be ready now
                    others -= 1
                    continue
            if last:
                raise error
            await self._pause(call, attempt, wait_s, error)
            attempt += 1

    async def attempt(
        self, call: Call, base: str, take: Callable[[aiohttp.ClientResponse], Awaitable[T]]
    ) -> T:
        """Send a call once, to one server; `take` gets a successful response, and must release it."""
        remaining = call.remaining_s()
        if remaining <= 0:
            raise errors.APITimeoutError("the call's deadline passed before it could be sent again")
        # The server's deadline is a little before the client's, so that the server's 504 has time to arrive.
        header = {"Spillway-Timeout": f"{remaining - min(0.25, remaining * 0.05):.3f}"}
        try:
            async with asyncio.timeout(remaining) as limit:
                response = await self.open().request(
                    call.method,
                    URL(base + call.path, encoded=True),
                    data=call.body,
                    headers={**call.headers, **header},
                    allow_redirects=False,
                )
                try:
                    if 200 <= response.status < 300:
                        return await take(response)
                    error = await error_of(response)
                except BaseException:
                    response.close()
                    raise
                if retry.should_retry(response.status, response.headers):
                    raise RetryableError(error)
                raise error
        except BROKEN as broken:
            if limit.expired():
                raise errors.APITimeoutError(f"no answer from {base} in time") from broken
            raise errors.APIConnectionError(sentence(broken, base)) from broken

    async def _pause(
        self, call: Call, attempt: int, wait_s: float | None, error: errors.SpillwayError
    ) -> None:
        delay = retry.delay_s(attempt, wait_s, random.random())
        if delay >= call.remaining_s():
            raise error
        log.debug("retrying %s %s in %.2f s: %s", call.method, call.path, delay, error)
        await asyncio.sleep(delay)

    # -- the end of work -----------------------------------------------------------------------------

    async def cancel(self, name: str) -> None:
        """End the work of a request, given by its id or its idempotency key, if the server can be reached."""
        with contextlib.suppress(errors.SpillwayError):
            await self.call(
                "POST", f"/v1/requests/{quote(name, safe='')}/cancel", timeout_s=CANCEL_S
            )

    @contextlib.asynccontextmanager
    async def cancelling(self, key: str | None) -> AsyncIterator[None]:
        """End the work begun under a key if the task is cancelled within the block."""
        try:
            yield
        except asyncio.CancelledError:
            if key is not None:
                self.cancel_later(key)
            raise

    def cancel_later(self, name: str) -> None:
        """End the work of a request in the background; `close` waits for that.

        A broken connection alone would not end the work, since a retry may come.
        """
        task = asyncio.create_task(self.cancel(name), name=CANCEL_TASK)
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    def leave_with(self, stream: Any) -> None:
        """Call `stream.leave()` when the client is closed, if the stream still exists then."""
        self._leaving.add(stream)

    # -- streams ---------------------------------------------------------------------------------------

    async def send(
        self, path: str, parts: AsyncIterable[bytes], *, content_type: str, timeout_s: float | None
    ) -> Answer:
        """POST a stream of bytes, and return the answer; one try."""
        call = self.prepared(
            "POST",
            path,
            headers={"Content-Type": content_type},
            timeout_s=timeout_s,
            default_s=GENERATION_TIMEOUT_S,
        )
        try:
            return await self.attempt(replace(call, body=parts), self.servers.now, answer_of)
        except RetryableError as refused:
            raise refused.error from None

    async def stream(
        self, path: str, *, headers: Mapping[str, str], timeout_s: float | None
    ) -> AsyncIterator[bytes]:
        """Yield the bytes of a streamed answer, by default of server-sent events; one try."""
        limit_s = self._timeout_s or TIMEOUT_S if timeout_s is None else checked_timeout(timeout_s)
        merged = {**self._headers, "Accept": "text/event-stream", **headers}
        base = self.servers.now
        url = URL(base + path, encoded=True)
        try:
            async with asyncio.timeout(limit_s) as limit:
                async with self.open().get(url, headers=merged) as response:
                    if response.status != 200:
                        raise await error_of(response)
                    async for data in response.content.iter_any():
                        yield data
        except BROKEN as error:
            if limit.expired():
                raise errors.APITimeoutError(
                    f"no end of the stream within {limit_s:g} s"
                ) from error
            self.servers.leave(base)
            raise errors.APIConnectionError(sentence(error, base)) from error

    async def pause(self, attempt: int) -> None:
        """Wait as long as between two tries of a call."""
        await asyncio.sleep(retry.delay_s(attempt, None, random.random()))


async def _once(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request once, since this module counts the tries.

    After these two errors aiohttp itself would send a GET, PUT or DELETE a second time on a new connection.
    """
    try:
        return await send(request)
    except aiohttp.ClientConnectorError:
        raise  # aiohttp does not send again after this error, whose text names the address
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(str(error)) from error


class _DoneBefore(Exception):
    """A DELETE found nothing because an earlier try of it had succeeded."""
