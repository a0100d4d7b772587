"""Refusals: the error of a request that was not admitted, with the seconds after which to try again."""

from __future__ import annotations

import math
import random

from common.bus import BusFull
from common.errors import Conflict, NotFound, RateLimited, SpillwayError, Unavailable
from services.router import metrics


def retry_after(seconds: float) -> float:
    """Return `seconds` as a wait of 1 to 60 s, jittered so that refused clients do not return all at once."""
    return float(min(60, max(1, math.ceil(seconds * random.uniform(1.0, 1.3)))))


def refusal(reason: str, retry_after_s: float) -> SpillwayError:
    """Return the error of a refused admission."""
    metrics.REFUSED.labels(reason).inc()
    wait = retry_after(retry_after_s)
    if reason == "no_worker":
        return Unavailable(
            "no worker of this kind is up; try again", code="no_worker", retry_after_s=wait
        )
    if reason == "bus_full":
        return BusFull("the bus is full; running work goes on, try again later", retry_after_s=wait)
    if reason == "session_not_found":
        return NotFound(
            "no such session: it is unknown, deleted or expired", code=reason, param="session"
        )
    if reason == "session_busy":
        return Conflict(
            "the session is in a turn; send the next one when that has ended, or cancel it",
            code=reason,
            param="session",
        )
    if reason == "session_changed":
        return Conflict(
            "the session went on while this turn was being prepared; send it again",
            code=reason,
            param="session",
        )
    sentences = {
        "depth": "every lane holds as many items as it can finish in time",
        "tokens": "every lane holds as many tokens as it can finish in time",
        "deadline": "no lane could finish this before its deadline",
    }
    return RateLimited(
        f"busy: {sentences.get(reason, reason)}; come back after Retry-After",
        code=reason,
        retry_after_s=wait,
    )
