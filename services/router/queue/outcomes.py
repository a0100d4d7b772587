"""What became of a job, as the error a client sees."""

from __future__ import annotations

import msgspec

from common.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    JobFailed,
    NotFound,
    RateLimited,
    SpillwayError,
    TooLarge,
    Unavailable,
    Unprocessable,
    from_code,
)
from common.messages import Event, Result, decode_result

# Codes that cross the bus and are not a class' own; anything unknown is an internal error.
_CLASSES: dict[type[SpillwayError], tuple[str, ...]] = {
    InvalidRequest: (
        "invalid_filter",
        "invalid_value",
        "invalid_json",
        "invalid_token",
        "invalid_chunking",
        "invalid_cursor",
        "invalid_vector",
        "invalid_id",
        "bad_message",
        "dimension_mismatch",
        "zero_vector",
        "context_length_exceeded",
        "vectors_only",
        "empty_input",
        "too_deep",
        "bad_input",
        "result_too_large",
        "invalid_session",
        "invalid_messages",
        "no_chat_template",
    ),
    Conflict: (
        "encoder_mismatch",
        "fingerprint_mismatch",
        "idempotency_conflict",
        "collection_exists",
        "collection_busy",
        "collection_changed",
        "session_busy",
        "session_changed",
        "session_deleted",
    ),
    NotFound: (
        "collection_not_found",
        "document_not_found",
        "model_not_found",
        "request_not_found",
        "session_not_found",
    ),
    TooLarge: ("document_too_large", "filter_too_large", "session_too_large"),
    RateLimited: ("tokens", "deadline", "quota"),
    Unprocessable: ("not_embeddable",),
    Unavailable: (
        "bus_down",
        "bus_full",
        "no_worker",
        "draining",
        "worker_lost",
        "disk_full",
        "text_pool_busy",
        "text_pool_broken",
        "template_broken",
        "behind",
        "not_applied",
        "collection_missing",
        "read_only",
        "replica_behind",
        "search_failed",
        "session_running",
        "shard_damaged",
        "storage_failed",
    ),
}
_BY_CODE = {code: cls for cls, codes in _CLASSES.items() for code in codes}


class _ComeBack(msgspec.Struct):
    """What an error's event says beside its code."""

    retry_after_s: float | None = None


def rebuilt(code: str, message: str) -> SpillwayError:
    """Return the error that crossed the bus as (code, message)."""
    cls = _BY_CODE.get(code)
    return cls(message, code=code) if cls else from_code(code, message)


def error_of(event: Event) -> SpillwayError:
    """Return the error of a job's outcome that is no result."""
    if event.kind == "expired":
        return DeadlineExceeded(event.message or "the deadline passed before the result")
    if event.kind == "cancelled":
        return Cancelled("the request was cancelled")
    if event.kind == "dead":
        return JobFailed(
            event.message or "the request's job was convicted of failing; its dead letter tells why"
        )
    if event.kind == "error":
        error = rebuilt(event.code, event.message or event.code)
        if event.data:
            error.retry_after_s = msgspec.json.decode(event.data, type=_ComeBack).retry_after_s
        return error
    return InternalError(f"a job ended with {event.kind!r}")


def result_of(event: Event) -> Result:
    """Return the result of an outcome, or raise its error."""
    if event.kind != "result":
        raise error_of(event)
    return decode_result(event.data)
