"""Outcomes of jobs: the result, or the error that the client sees."""

from __future__ import annotations

import msgspec

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    JobFailed,
    SpillwayError,
    rebuild,
)
from common.wire.results import ErrorDetails, Event, Result, decode_result


class _RetryAfter(msgspec.Struct):
    """The data of an error event that an earlier version wrote."""

    retry_after_s: float | None = None


def _details(event: Event) -> ErrorDetails:
    if event.error is None:
        data = event.data or b"{}"
        wait = msgspec.json.decode(data, type=_RetryAfter).retry_after_s
        return ErrorDetails(status=0, retry_after_s=wait)
    return event.error


def error_of(event: Event) -> SpillwayError:
    """Return the error of a job's outcome other than a result."""
    if event.kind == "expired":
        return DeadlineExceeded(event.message or "the deadline passed before the result")
    if event.kind == "cancelled":
        return Cancelled("the request was cancelled")
    if event.kind == "dead":
        return JobFailed(
            event.message or "the request's job was convicted of failing; its dead letter tells why"
        )
    if event.kind == "error":
        details = _details(event)
        return rebuild(
            event.code,
            event.message or event.code,
            status=details.status,
            param=details.param,
            retry_after_s=details.retry_after_s,
        )
    return InternalError(f"a job ended with {event.kind!r}")


def result_of(event: Event) -> Result:
    """Return the result of an outcome, or raise its error."""
    if event.kind != "result":
        raise error_of(event)
    return decode_result(event.data)
