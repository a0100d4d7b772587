"""Completions begun at once on one server, as one client reads their streams."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Sequence
from itertools import pairwise

import aiohttp
import msgspec

from bench.workloads.conversations import ORDINARY, Turn
from bench.workloads.turns import System
from loadgen.chat.frames import Frames

SILENT_S = 900.0  # a server that sends nothing for so long has hung
_WORD = re.compile(r"w(\d+)")
_NOTHING = random.Random(0)
Part = tuple[float, bytes]


class BatchError(Exception):
    """A server answered otherwise than it was asked; the message says how."""


class _Choice(msgspec.Struct):
    text: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


_decoder = msgspec.json.Decoder(_Completion)


class StreamSeen(msgspec.Struct, frozen=True):
    """One stream at its client; moments are seconds from when all were sent.

    `chunks` are the tokens in each event of the stream, `gaps_s` lie between reads of the connection that brought any.
    `early` are the tokens that came with the first.
    """

    first_s: float
    last_s: float
    done_s: float
    early: int
    gaps_s: list[float]
    chunks: list[int]
    answer: list[int]

    @property
    def token_s(self) -> float:
        """Return the mean seconds of a token after the first ones; 0 if all came at once."""
        later = len(self.answer) - self.early
        return (self.last_s - self.first_s) / later if later else 0.0


def prompts(count: int, tokens: int, vocabulary: int, seed: str) -> list[list[int]]:
    """Return prompts of random ordinary tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.choices(range(ORDINARY, vocabulary), k=tokens) for _ in range(count)]


def read_stream(parts: Sequence[Part], done_s: float) -> StreamSeen:
    """Return what the parts of a response's body hold, each with the moment it came; BatchError without a token."""
    frames, answer = Frames(), list[int]()
    moments, chunks = list[tuple[float, int]](), list[int]()
    for at, part in parts:
        before = len(answer)
        for frame in frames.feed(part):
            if found := tokens_in(frame.data):
                chunks.append(len(found))
                answer += found
        if len(answer) > before:
            moments.append((at, len(answer) - before))
    if not answer:
        raise BatchError(f"no token in {b''.join(part for _, part in parts)[:200]!r}")
    times = [at for at, _ in moments]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return StreamSeen(times[0], times[-1], done_s, moments[0][1], gaps, chunks, answer)


def tokens_in(data: bytes) -> list[int]:
    """Return the tokens of one event's data."""
    if data == b"[DONE]":
        return []
    texts = (choice.text or "" for choice in _decoder.decode(data).choices)
    return [int(word) for text in texts for word in _WORD.findall(text)]


async def run_batch(
    system: System, asked: Sequence[Sequence[int]], wanted: int
) -> list[StreamSeen]:
    """Send all prompts at once and read the answers of `wanted` tokens; BatchError if one is not that."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        bodies = [system.body([], Turn(0.0, list(prompt), wanted), _NOTHING) for prompt in asked]
        raw = [msgspec.json.encode(body) for body in bodies]
        began = time.monotonic()
        # Streams are only stored while they come: what they hold is read afterwards.
        found = await asyncio.gather(*(_ask(http, system.url, body, began) for body in raw))
    streams = [read_stream(parts, done_s) for parts, done_s in found]
    for stream in streams:
        if len(stream.answer) != wanted:
            raise BatchError(f"{system.url}: {len(stream.answer)} tokens of {wanted}")
    return streams


async def _ask(
    http: aiohttp.ClientSession, url: str, body: bytes, began: float
) -> tuple[list[Part], float]:
    """Return the parts of one answer's body with the moments they came, and the moment it ended."""
    parts = list[Part]()
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(f"{url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise BatchError(f"{url}: status {response.status}: {await response.text()}")
            async for part in response.content.iter_any():
                parts.append((time.monotonic() - began, part))
    except (aiohttp.ClientError, OSError) as error:
        raise BatchError(f"{url}: {type(error).__name__} {error}") from error
    return parts, time.monotonic() - began
