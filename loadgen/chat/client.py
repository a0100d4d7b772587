"""A chat client: one streamed request, attached, or resumable at any router by request id and Last-Event-ID."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from loadgen.chat.answer import StreamedAnswer
from loadgen.chat.frames import Frames

CHAT = "/v1/chat/completions"
AGAIN_S = 0.2
_BROKEN = (aiohttp.ClientError, OSError, asyncio.IncompleteReadError)
_AGAIN = frozenset({429, 500, 502, 503})


class Chat:
    """Sends chat requests to routers in turn; use as `async with Chat(urls) as chat`.

    With `resume_s` above 0 a request outlives its connection: it is sent under one idempotency key until a router
    accepts it, and read on at the next router, from the last piece that came, until it ends or `timeout_s` is over.
    `broken` counts the failures that made it go on. Without `resume_s` the first failure ends the request.
    """

    def __init__(
        self,
        urls: list[str],
        *,
        key: str = "",
        resume_s: float = 0.0,
        timeout_s: float = 120.0,
        connections: int = 0,
    ) -> None:
        self._urls = urls
        self._turn = itertools.count()
        self._resume_s = resume_s
        self._timeout_s = timeout_s
        self._connections = connections
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._http: aiohttp.ClientSession | None = None
        self.broken: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def ask(
        self,
        body: dict[str, Any],
        *,
        key: str = "",
        first: int | None = None,
        seen: Callable[[StreamedAnswer], None] | None = None,
    ) -> StreamedAnswer:
        """Ask for one streamed answer; failures of servers and connections are part of the answer, not raised.

        `first` is the index of the router to begin with; `seen` is called whenever the answer has grown.
        """
        sent = {"stream_options": {"include_usage": True}, **body, "stream": True}
        answer, raw = StreamedAnswer(), msgspec.json.encode(sent)
        turn = next(self._turn) if first is None else first
        key = key or uuid.uuid4().hex
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    if await self._try(answer, raw, key, turn + answer.tries, seen):
                        break
                    await asyncio.sleep(min(answer.retry_after_s or AGAIN_S, 2.0))
        except TimeoutError:
            answer.fail("client_timeout", f"no end within {self._timeout_s:g} s")
        return answer

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, Any]:
        """Make one plain call; return its status and decoded body. A resumable client tries until a router answers."""
        raw = None if body is None else msgspec.json.encode(body)
        headers = {"Accept": "application/json"}
        if method == "POST" and self._resume_s > 0:
            headers["Idempotency-Key"] = uuid.uuid4().hex
        limit = time.monotonic() + self._timeout_s
        while True:
            status, payload = await self._call(method, path, raw, headers)
            over = self._resume_s <= 0 or time.monotonic() > limit
            if over or (status and status not in _AGAIN):
                return status, payload
            self.broken[str(payload) if status == 0 else f"status {status}"] += 1
            await asyncio.sleep(AGAIN_S)

    async def _call(
        self, method: str, path: str, raw: bytes | None, headers: dict[str, str]
    ) -> tuple[int, Any]:
        if self._http is None:
            raise RuntimeError("Chat is used outside its `async with`")
        url = self._urls[next(self._turn) % len(self._urls)] + path
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.request(method, url, data=raw, headers=headers) as response,
            ):
                found = await response.read()
                return response.status, msgspec.json.decode(found) if found else None
        except _BROKEN as error:
            return 0, type(error).__name__
        except msgspec.DecodeError as error:
            return 0, f"no JSON: {error}"

    async def _try(
        self,
        answer: StreamedAnswer,
        raw: bytes,
        key: str,
        turn: int,
        seen: Callable[[StreamedAnswer], None] | None,
    ) -> bool:
        """Read from one connection; return whether the answer is final."""
        url = self._urls[turn % len(self._urls)]
        answer.tries += 1
        answer.retry_after_s = None
        answer.code = answer.message = ""
        answer.done = False
        try:
            async with self._open(answer, url, raw, key) as response:
                answer.status = response.status
                answer.request = response.headers.get("x-request-id", answer.request)
                if response.status != 200:
                    return self._refused(answer, response, await response.read())
                await _read(answer, response, seen)
        except _BROKEN as error:
            answer.fail(type(error).__name__, str(error))
            return self._final(answer, again=True)
        if not answer.done:
            answer.fail("cut", "the connection ended before the stream did")
        return self._final(answer, again=answer.code in {"cut", "bus_down", "draining"})

    def _open(self, answer: StreamedAnswer, url: str, raw: bytes, key: str) -> Any:
        if self._http is None:
            raise RuntimeError("Chat is used outside its `async with`")
        if not (answer.request and self._resume_s > 0 and answer.last is not None):
            headers = {}
            if self._resume_s > 0:
                headers = {"Spillway-Resume": f"{self._resume_s:g}", "Idempotency-Key": key}
            return self._http.post(url + CHAT, data=raw, headers=headers)
        answer.resumes += 1
        headers = {"Last-Event-ID": answer.last_id}
        return self._http.get(f"{url}/v1/requests/{answer.request}/events", headers=headers)

    def _refused(
        self, answer: StreamedAnswer, response: aiohttp.ClientResponse, raw: bytes
    ) -> bool:
        try:
            error = msgspec.json.decode(raw)["error"]
            answer.fail(str(error["code"]), str(error["message"]))
        except (msgspec.DecodeError, KeyError, TypeError):
            answer.fail("no_error_body", raw[:200].decode("utf-8", "replace"))
        told = response.headers.get("Retry-After", "")
        answer.retry_after_s = float(told) if told.isdigit() else None
        return self._final(answer, again=response.status in _AGAIN)

    def _final(self, answer: StreamedAnswer, *, again: bool) -> bool:
        if not answer.code:
            return True
        if again and self._resume_s > 0:
            self.broken[answer.code] += 1
            return False
        return True


async def _read(
    answer: StreamedAnswer,
    response: aiohttp.ClientResponse,
    seen: Callable[[StreamedAnswer], None] | None,
) -> None:
    frames = Frames()
    async for part in response.content.iter_any():
        now = time.monotonic()
        for frame in frames.feed(part):
            answer.take(frame, now)
        if seen is not None:
            seen(answer)
        if answer.done:
            return
