"""One HTTP call with its deadline, its retries and its idempotency key; resources build on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import ssl as ssl_module
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from yarl import URL

from . import errors, retry

log = logging.getLogger("spillway_client")
CONNECT_S = 5.0
CANCEL_S = 2.0
_BROKEN = (aiohttp.ClientError, ConnectionError, OSError, asyncio.TimeoutError)


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: its decoded JSON, and the request's id."""

    payload: Any
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """What stays the same over all tries of one call."""

    method: str
    url: URL
    body: bytes | None
    headers: Mapping[str, str]
    deadline: float

    def remaining_s(self) -> float:
        """Seconds until the call gives up."""
        return self.deadline - time.monotonic()


def encode(body: Any) -> bytes:
    """Return JSON bytes; InvalidInputError for NaN, infinities and objects JSON has no form for."""
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidInputError(f"the request has no JSON form: {error}") from error


class Transport:
    """Owns the connections; its `call` raises only this package's errors."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        timeout_s: float,
        max_retries: int,
        resume_s: float,
        max_connections: int,
        ssl: ssl_module.SSLContext | bool,
    ) -> None:
        self._base = _checked_url(base_url)
        self._timeout_s = _checked_timeout(timeout_s)
        if max_retries < 0:
            raise errors.InvalidInputError(f"max_retries is {max_retries}; expected 0 or more")
        if not 0 <= resume_s <= 300:
            raise errors.InvalidInputError(f"resume_s is {resume_s}; expected 0 to 300")
        self._max_retries = max_retries
        self._max_connections = max_connections
        self._ssl = ssl
        self._session: aiohttp.ClientSession | None = None
        self._cancels: set[asyncio.Task[None]] = set()
        self._headers = {"Accept": "application/json", "Spillway-Resume": f"{resume_s:g}"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise errors.InvalidInputError(
                    "api_key contains characters an HTTP header cannot hold"
                )
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def base_url(self) -> str:
        """The server's address, without a trailing slash."""
        return self._base

    def open(self) -> aiohttp.ClientSession:
        """Return the session, made at first use inside the running loop."""
        if self._session is None or self._session.closed:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, ssl=self._ssl),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
            # aiohttp repeats a GET or DELETE on its own after a broken connection, unseen; tries are ours to count.
            if hasattr(session, "_retry_connection"):
                session._retry_connection = False
            self._session = session
        return self._session

    async def close(self) -> None:
        """Close all connections, after telling the server what was cancelled; idempotent."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=CANCEL_S)
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Answer:
        """Make one call; `timeout_s` covers all its tries and is the request's deadline at the server.

        Every POST carries one idempotency key over all its tries, so a retry attaches to the work of an earlier
        try and never does it twice. Raises the classes of `spillway_client.errors`.
        """
        limit_s = self._timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        key = (idempotency_key or uuid.uuid4().hex) if method == "POST" else None
        headers = self._headers if key is None else {**self._headers, "Idempotency-Key": key}
        data = None if body is None else encode(body)
        if data is not None:
            headers = {**headers, "Content-Type": "application/json"}
        call = Call(method, self._url(path, query), data, headers, time.monotonic() + limit_s)
        try:
            return await self._tries(call)
        except asyncio.CancelledError:
            if key is not None and not path.startswith("/v1/requests/"):
                task = asyncio.create_task(self._cancel(key))
                self._cancels.add(task)
                task.add_done_callback(self._cancels.discard)
            raise

    async def _cancel(self, key: str) -> None:
        """End the work begun under a key, which a broken connection alone would leave running for a retry."""
        with contextlib.suppress(errors.SpillwayError):
            await self.call(
                "POST", f"/v1/requests/{quote(key, safe='')}/cancel", timeout_s=CANCEL_S
            )

    async def _tries(self, call: Call) -> Answer:
        unclear = False
        for attempt in range(self._max_retries + 1):
            last = attempt == self._max_retries
            try:
                return await self._attempt(call)
            except errors.APITimeoutError:
                raise
            except errors.APIConnectionError as error:
                unclear = True
                if last:
                    raise
                await self._pause(call, attempt, None, error)
            except _Retry as retried:
                if last:
                    raise retried.error from None
                await self._pause(call, attempt, retried.error.retry_after_s, retried.error)
            except errors.NotFoundError:
                if (
                    call.method == "DELETE" and unclear
                ):  # an earlier try did it, its answer was lost
                    return Answer({}, None)
                raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def stream(
        self, path: str, *, headers: Mapping[str, str], timeout_s: float | None
    ) -> AsyncIterator[bytes]:
        """Yield the lines of a server-sent stream from one connection (no retries)."""
        limit_s = self._timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        merged = {**self._headers, **headers, "Accept": "text/event-stream"}
        try:
            async with asyncio.timeout(limit_s) as limit:
                async with self.open().get(self._url(path, None), headers=merged) as response:
                    if response.status != 200:
                        raise await _error(response)
                    async for line in response.content:
                        yield line.rstrip(b"\r\n")
        except _BROKEN as error:
            if limit.expired():
                raise errors.APITimeoutError(
                    f"no end of the stream within {limit_s:g} s"
                ) from error
            raise errors.APIConnectionError(_sentence(error, self._base)) from error

    async def pause(self, attempt: int) -> None:
        """Wait as between two tries of a call."""
        await asyncio.sleep(retry.delay_s(attempt, None, random.random()))

    def _url(self, path: str, query: Mapping[str, Any] | None) -> URL:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        return URL(self._base + path + (f"?{urlencode(given)}" if given else ""), encoded=True)

    async def _attempt(self, call: Call) -> Answer:
        remaining = call.remaining_s()
        if remaining <= 0:
            raise errors.APITimeoutError("the call's deadline passed before it could be sent again")
        # The server's deadline is a little before ours, so that its own 504 has time to arrive.
        header = {"Spillway-Timeout": f"{remaining - min(0.25, remaining * 0.05):.3f}"}
        try:
            async with asyncio.timeout(remaining) as limit:
                async with self.open().request(
                    call.method,
                    call.url,
                    data=call.body,
                    headers={**call.headers, **header},
                    allow_redirects=False,
                ) as response:
                    if 200 <= response.status < 300:
                        return Answer(await _json(response), response.headers.get("x-request-id"))
                    error = await _error(response)
                    if retry.should_retry(response.status, response.headers):
                        raise _Retry(error)
                    raise error
        except _BROKEN as broken:
            if limit.expired():
                raise errors.APITimeoutError(f"no answer from {self._base} in time") from broken
            raise errors.APIConnectionError(_sentence(broken, self._base)) from broken

    async def _pause(
        self, call: Call, attempt: int, wait_s: float | None, error: errors.SpillwayError
    ) -> None:
        delay = retry.delay_s(attempt, wait_s, random.random())
        if delay >= call.remaining_s():
            raise error
        log.debug("retrying %s %s in %.2f s: %s", call.method, call.url.path, delay, error)
        await asyncio.sleep(delay)


class _Retry(Exception):
    def __init__(self, error: errors.APIStatusError) -> None:
        super().__init__(str(error))
        self.error = error


def _checked_url(base_url: str) -> str:
    try:
        url = URL(base_url.strip())
    except ValueError as error:
        raise errors.InvalidInputError(f"base_url {base_url!r}: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise errors.InvalidInputError(
            f"base_url is {base_url!r}; expected http://host:port or https://host"
        )
    return str(url).rstrip("/").removesuffix("/v1")


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < float("inf"):
        raise errors.InvalidInputError(f"timeout_s is {timeout_s}; expected seconds above 0")
    return timeout_s


def _sentence(error: BaseException, base: str) -> str:
    return f"{base}: {str(error) or type(error).__name__}"


async def _json(response: aiohttp.ClientResponse) -> Any:
    data = await response.read()
    try:
        return json.loads(data) if data else {}
    except ValueError as error:
        raise errors.SpillwayError(
            f"{response.url}: expected JSON, got {data[:120]!r}; is this a Spillway server?"
        ) from error


async def _error(response: aiohttp.ClientResponse) -> errors.APIStatusError:
    text = (await response.read()).decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    return errors.from_response(
        response.status,
        body,
        request_id=response.headers.get("x-request-id"),
        retry_after_s=retry.retry_after_s(response.headers),
    )
