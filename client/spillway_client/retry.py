"""Retries: whether a call is tried again, and after how long, from the status and headers of an answer."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 8.0
MAX_RETRY_AFTER_S = 120.0
_RETRIED = frozenset({408, 429})


def retry_after_s(headers: Mapping[str, str], now_s: float | None = None) -> float | None:
    """Return the wait in seconds that the server asks for, by `retry-after-ms` or `Retry-After`; None without one."""
    millis = _number(headers.get("retry-after-ms"))
    if millis is not None:
        return millis / 1000
    text = headers.get("Retry-After")
    seconds = _number(text)
    if seconds is not None or text is None:
        return seconds
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, when.timestamp() - (time.time() if now_s is None else now_s))


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def should_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether to send a call again after this answer.

    `x-should-retry` decides if present; otherwise 408, 429 and 5xx are tried again. After a wish to wait for more than
    two minutes there is no other try. Spillway's 409 states a fact that time does not change, so it is tried again only
    if `x-should-retry` says so.
    """
    wait_s = retry_after_s(headers)
    if wait_s is not None and wait_s > MAX_RETRY_AFTER_S:
        return False
    told = headers.get("x-should-retry", "").lower()
    if told in {"true", "false"}:
        return told == "true"
    return status in _RETRIED or status >= 500


def delay_s(attempt: int, wait_s: float | None, jitter: float) -> float:
    """Return the seconds before try `attempt` + 1 (counted from 0); `jitter` is in [0, 1).

    The server's `wait_s` is obeyed, and exceeded by at most a tenth, so that clients refused together do not all come
    back at once. Without one the delay begins at FIRST_DELAY_S, doubles up to MAX_DELAY_S, and is shortened by at most
    a quarter.
    """
    if wait_s is not None:
        return wait_s * (1 + 0.1 * jitter)
    return min(FIRST_DELAY_S * 2.0 ** min(attempt, 10), MAX_DELAY_S) * (1 - 0.25 * jitter)
