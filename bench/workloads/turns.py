"""Turns of conversations in an open loop over HTTP, to any server of /v1/completions.

Every system gets the same requests. Vocabularies are words `w<id>`, so what a server streams tells its token ids.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from bench.mesh.probe import MeshError
from bench.workloads.conversations import ORDINARY, Begun, Turn
from loadgen import arrivals
from loadgen.chat.frames import Frames

SETTLE_S = 120.0  # for a server to be done with what was cut off
_WORD = re.compile(r"w(\d+)")


@dataclass(frozen=True, slots=True)
class System:
    """A server under load: how a prompt is written, what else a request says, and how its page tiers were used.

    With `forget` the first two tokens of every request are others, so that no page of it was seen before. `pids` are
    the processes to stop for it to stand still.
    """

    url: str
    vocabulary: int
    words: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    forget: bool = False
    counted: Callable[[], Awaitable[dict[str, int]]] | None = None
    pids: tuple[int, ...] = ()

    def body(self, history: Sequence[int], turn: Turn, rng: random.Random) -> dict[str, Any]:
        """Return the request for a turn after this history."""
        tokens = [*history, *turn.tokens]
        if self.forget:
            tokens[:2] = [rng.randrange(ORDINARY, self.vocabulary) for _ in tokens[:2]]
        prompt = "".join(f"w{token}" for token in tokens) if self.words else tokens
        base = {"prompt": prompt, "max_tokens": turn.wanted, "temperature": 0.0, "stream": True}
        wanted = {"min_tokens": turn.wanted} if self.more.get("ignore_eos") else {}
        return base | self.more | wanted


@dataclass(slots=True)
class AskedTurn:
    """One turn as it went; moments are seconds from the run's start, None what did not come; `code` why it failed."""

    due_s: float
    turn: int
    prompt: int
    wanted: int
    first_s: float | None = None
    done_s: float | None = None
    tokens: int = 0
    code: str = ""

    def normalized_s(self, now_s: float) -> float:
        """Return latency by output token; of a failed turn infinite, of an open one what it has at least become."""
        if self.code:
            return math.inf
        if self.done_s is None:
            return (now_s - self.due_s) / self.wanted
        return (self.done_s - self.due_s) / max(1, self.tokens)


class TurnLoad:
    """Conversations that arrive at a rate, and those that are under way before, against one system."""

    def __init__(
        self,
        system: System,
        conversations: Iterable[list[Turn]],
        seed: int,
        begun: Iterable[Begun] = (),
    ) -> None:
        self._system, self._begun = system, begun
        self._conversations = iter(conversations)
        # Drawn apart, so that conversations arrive alike at every system.
        self._arrivals, self._rng = random.Random(seed), random.Random(f"{seed}-forgotten")
        self._began_s = 0.0
        self.asked: list[AskedTurn] = []

    async def run(self, rate: float, seconds: float) -> list[AskedTurn]:
        """Begin `rate` conversations a second for so long, then cut off what is open; return every turn asked.

        The first begins once the server has answered a short request: it is done with what was cut off before.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            await self._settled(http)
            self.asked, self._began_s = [], time.monotonic()
            tasks = {asyncio.create_task(self._converse(http, each)) for each in self._begun}
            for due in arrivals.poisson(rate, self._arrivals):
                if due >= seconds:
                    break
                await asyncio.sleep(self._began_s + due - time.monotonic())
                fresh = Begun([], 0, next(self._conversations))
                tasks.add(asyncio.create_task(self._converse(http, fresh)))
            await asyncio.sleep(self._began_s + seconds - time.monotonic())
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
        return self.asked

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    async def _settled(self, http: aiohttp.ClientSession) -> None:
        """Wait for the answer to a short request; MeshError if there is none in time."""
        short = Turn(0.0, [ORDINARY] * 2, 1)
        try:
            async with asyncio.timeout(SETTLE_S):
                body = self._system.body([], short, random.Random())
                await self._ask(http, body, AskedTurn(0.0, 0, 2, 1))
        except (aiohttp.ClientError, OSError) as error:
            why = f"{type(error).__name__} {error}"
            raise MeshError(f"no answer to a short request within {SETTLE_S:g} s: {why}") from error

    async def _converse(self, http: aiohttp.ClientSession, begun: Begun) -> None:
        history = list(begun.history)
        for number, turn in enumerate(begun.turns, begun.past):
            await asyncio.sleep(turn.think_s)
            prompt = len(history) + len(turn.tokens)
            asked = AskedTurn(self._now(), number, prompt, turn.wanted)
            self.asked.append(asked)
            body = self._system.body(history, turn, self._rng)
            try:
                answer = await self._ask(http, body, asked)
            except (aiohttp.ClientError, OSError) as error:
                asked.code = type(error).__name__
            if asked.code:
                return
            history += [*turn.tokens, *answer]

    async def _ask(
        self, http: aiohttp.ClientSession, body: dict[str, Any], asked: AskedTurn
    ) -> list[int]:
        """Return the answer's token ids."""
        text, frames = "", Frames()
        url = f"{self._system.url}/v1/completions"
        async with await _post(http, url, body) as response:
            if response.status != 200:
                asked.code = f"status {response.status}: {(await response.text())[:200]}"
                return []
            async for part in response.content.iter_any():
                for frame in frames.feed(part):
                    text += _text(frame.data, asked)
                if text and asked.first_s is None:
                    asked.first_s = self._now()
        answer = [int(word) for word in _WORD.findall(text)]
        asked.tokens, asked.done_s = len(answer), self._now()
        if len(answer) != asked.wanted:
            asked.code = asked.code or f"{len(answer)} tokens of {asked.wanted}"
        return answer


async def _post(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> aiohttp.ClientResponse:
    """Send a request, and once more where the server closed the kept connection meanwhile, as OpenAI's client does."""
    try:
        return await http.post(url, json=body)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
        return await http.post(url, json=body)


def _text(data: bytes, asked: AskedTurn) -> str:
    if data == b"[DONE]":
        return ""
    chunk = msgspec.json.decode(data)
    if "error" in chunk:
        asked.code = str(chunk["error"])[:200]
        return ""
    return "".join(choice.get("text") or "" for choice in chunk["choices"])


@dataclass(frozen=True, slots=True)
class Point:
    """One rate, as measured after the warm-up: what was answered a second, and the 90th percentile of latency.

    `still` unless the machine's speed moved meanwhile.
    """

    rate: float
    turns_per_s: float
    tokens_per_s: float
    normalized_s: float
    first_s: float
    count: int
    failed: int
    still: bool = True


def point(asked: Sequence[AskedTurn], rate: float, warm_s: float, end_s: float) -> Point:
    """Return the figures of [warm_s, end_s): turns that ended in it, and the latency of those that began in it.

    An open turn counts if it already took longer than the 90th percentile of those that ended.
    """
    ended = [a for a in asked if a.done_s is not None and not a.code and a.done_s >= warm_s]
    begun = [a for a in asked if a.due_s >= warm_s]
    closed = sorted(a.normalized_s(end_s) for a in begun if a.done_s is not None or a.code)
    so_far = [a.normalized_s(end_s) for a in begun if a.done_s is None and not a.code]
    limit = ninetieth(closed)
    seconds = end_s - warm_s
    first = sorted(a.first_s - a.due_s for a in begun if a.first_s is not None)
    return Point(
        rate,
        len(ended) / seconds,
        sum(a.tokens for a in ended) / seconds,
        ninetieth(sorted([*closed, *(s for s in so_far if s > limit)])),
        ninetieth(first),
        len(begun),
        sum(bool(a.code) for a in begun),
    )


def ninetieth(values: Sequence[float]) -> float:
    """Return the 90th percentile of sorted values, one of them; infinite if there is none."""
    return values[math.ceil(0.9 * len(values)) - 1] if values else math.inf


def at_limit(points: Sequence[Point], limit_s: float) -> tuple[float, float, bool]:
    """Return turns and tokens a second where p90 normalized latency reaches `limit_s`, and whether it was reached.

    Between the last rate within the limit and the next one, both are interpolated; (0, 0) if no rate is within.
    """
    found = (0.0, 0.0)
    before: Point | None = None
    for each in sorted(points, key=lambda p: p.rate):
        if each.normalized_s > limit_s:
            if before is None or math.isinf(each.normalized_s):
                return *found, True
            part = (limit_s - before.normalized_s) / (each.normalized_s - before.normalized_s)
            turns = before.turns_per_s + part * (each.turns_per_s - before.turns_per_s)
            tokens = before.tokens_per_s + part * (each.tokens_per_s - before.tokens_per_s)
            return turns, tokens, True
        before, found = each, (each.turns_per_s, each.tokens_per_s)
    return *found, False
