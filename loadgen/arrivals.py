"""Arrival times of requests: rising offsets in seconds from the start, endless or finite.

An open loop sends at these times independently of the server, so a slow answer delays no later request.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path


class TraceError(Exception):
    """A trace file cannot be used; the message names the file, the line and the expected form."""


def steady(rate: float) -> Iterator[float]:
    """Yield one arrival every 1/`rate` seconds."""
    return (i / rate for i in itertools.count())


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Yield arrivals with exponential gaps, `rate` a second on average."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursty(
    rate: float, rng: random.Random, *, burst: float = 4.0, on_s: float = 1.0
) -> Iterator[float]:
    """Yield a two-state Markov-modulated Poisson process of `rate` a second on average.

    On phases last `on_s` on average, with arrivals at `burst` times `rate`; off phases have no arrivals, and are as
    long as the average rate needs.
    """
    off_s = on_s * (burst - 1.0)
    now = 0.0
    while True:
        end = now + rng.expovariate(1.0 / on_s)
        while True:
            now += rng.expovariate(rate * burst)
            if now >= end:
                break
            yield now
        now = end + (rng.expovariate(1.0 / off_s) if off_s > 0 else 0.0)


def trace(path: Path, speed: float = 1.0) -> list[float]:
    """Read the arrivals of a JSONL trace; `timestamp` is in ms if an integer, in seconds if a float.

    `speed` 2.0 replays twice as fast. Offsets count from the first line; lines must not go back in time.
    """
    offsets: list[float] = []
    first = 0.0
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: expected a regular file of JSON lines")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            at = _timestamp(path, number, line)
            first = at if not offsets else first
            offset = (at - first) / speed
            if offsets and offset < offsets[-1]:
                raise TraceError(f"{path}, line {number}: the timestamp goes back in time")
            offsets.append(offset)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; expected a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 at byte {error.start}; expected JSON lines") from error
    if not offsets:
        raise TraceError(f"{path}: no line; expected one object with a 'timestamp' a line")
    return offsets


def _timestamp(path: Path, number: int, line: str) -> float:
    try:
        value = json.loads(line)["timestamp"]
        at = value / 1000.0 if isinstance(value, int) else float(value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(
            f"{path}, line {number}: expected an object with a numeric 'timestamp' ({repr(error)[:200]})"
        ) from error
    if not math.isfinite(at):
        raise TraceError(f"{path}, line {number}: the timestamp is {at}; expected a finite number")
    return at


def named(
    kind: str, rate: float, seed: int, *, burst: float = 4.0, path: Path | None = None
) -> Iterator[float]:
    """Build the arrivals named on the command line: steady, poisson, bursty or trace."""
    rng = random.Random(seed)
    if kind == "poisson":
        return poisson(rate, rng)
    if kind == "bursty":
        return bursty(rate, rng, burst=burst)
    if kind == "trace":
        if path is None:
            raise TraceError("arrivals 'trace' needs --trace FILE")
        return iter(trace(path))
    return steady(rate)
