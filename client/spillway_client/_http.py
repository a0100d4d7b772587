"""The small parts of an HTTP call: addresses, bodies, answers and errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from . import errors, retry

BROKEN = (aiohttp.ClientError, ConnectionError, OSError, asyncio.TimeoutError)


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: its decoded JSON, and the request's id."""

    payload: Any
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """The parts that all tries of a call share; `path` is encoded and has its query."""

    method: str
    path: str
    body: bytes | AsyncIterable[bytes] | None
    headers: Mapping[str, str]
    deadline: float

    def remaining_s(self) -> float:
        """The seconds left until the call's deadline."""
        return self.deadline - time.monotonic()


class RetryableError(Exception):
    """An error answer after which the call is tried again."""

    def __init__(self, error: errors.APIStatusError) -> None:
        super().__init__(str(error))
        self.error = error


class Servers:
    """The addresses of one or several routers of one instance; `now` is the one to call."""

    def __init__(self, base_urls: str | Sequence[str]) -> None:
        given = base_urls.split(",") if isinstance(base_urls, str) else list(base_urls)
        self.all = list(dict.fromkeys(checked_url(url) for url in given))
        if not self.all:
            raise errors.InvalidInputError("base_url is empty; expected at least one address")
        self.now = self.all[0]

    def leave(self, base: str) -> None:
        """Make the next address current, unless another call has left `base` already."""
        if self.now == base:
            self.now = self.all[(self.all.index(base) + 1) % len(self.all)]


def encode(body: Any) -> bytes:
    """Return JSON bytes; InvalidInputError for NaN, infinities and objects without a JSON form."""
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidInputError(f"the request has no JSON form: {error}") from error


def checked_url(base_url: str) -> str:
    """Return a server's address without a trailing slash or /v1; InvalidInputError for other text."""
    try:
        url = URL(base_url.strip())
    except ValueError as error:
        raise errors.InvalidInputError(f"base_url {base_url!r}: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise errors.InvalidInputError(
            f"base_url is {base_url!r}; expected http://host:port or https://host"
        )
    return str(url).rstrip("/").removesuffix("/v1")


def checked_timeout(timeout_s: float) -> float:
    """Return a timeout in seconds; InvalidInputError for an invalid one."""
    if not 0 < timeout_s < float("inf"):
        raise errors.InvalidInputError(f"timeout_s is {timeout_s}; expected seconds above 0")
    return timeout_s


def sentence(error: BaseException, base: str) -> str:
    """Return a sentence about a broken connection, with the server's address."""
    return f"{base}: {str(error) or type(error).__name__}"


async def answer_of(response: aiohttp.ClientResponse) -> Answer:
    """Read a successful JSON answer to its end."""
    data = await response.read()
    try:
        payload = json.loads(data) if data else {}
    except ValueError as error:
        raise errors.SpillwayError(
            f"{response.url}: expected JSON, got {data[:120]!r}; is this a Spillway server?"
        ) from error
    return Answer(payload, response.headers.get("x-request-id"))


async def error_of(response: aiohttp.ClientResponse) -> errors.APIStatusError:
    """Read an answer that is an error."""
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
