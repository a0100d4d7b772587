"""Every error the mesh can show, in one tree.

SpillwayError
├── InvalidRequest (400)        the request cannot be understood or is out of limits
├── Unauthenticated (401)       no key, or a wrong one
├── NotFound (404)              no such object, or another tenant's
├── MethodNotAllowed (405)      the path exists, the method does not
├── RequestTimeout (408)        the client sent its body too slowly
├── Conflict (409)              the stored state contradicts the request
├── TooLarge (413)              the body or an item exceeds its limit
├── Unprocessable (422)         understood, but it cannot be done with these values
├── Cancelled (499)             the client cancelled, or went away
├── RateLimited (429)           busy: over depth or quota; come back after `retry_after_s`
├── InternalError (500)         a fault of Spillway
│   └── JobFailed (500)         a job was convicted; its dead letter tells why
├── Unavailable (503)           not able now: draining, no worker, bus away or full
└── DeadlineExceeded (504)      the deadline passed before the result

Programs match on `code`; the message is for people, and names the fault, its place and the expected form. Every code is
defined once, in the `codes` of its class: an error cannot be made with a code that its class does not list.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

MAX_MESSAGE = 1000
_FOR_CLIENTS = {"bus_down": "the bus is away; try again"}  # the original names Redis' address


class SpillwayError(Exception):
    """Base of every error shown to a client.

    `code` is stable, and one of `codes`, by default the first; `param` names the offending field; `retry_after_s` is
    set if a later try may succeed. ValueError for a code that the class does not list.
    """

    http_status: int = 500
    type: ClassVar[str] = "invalid_request_error"
    codes: ClassVar[tuple[str, ...]] = ()
    default_code: ClassVar[str]
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Make the first of a class' codes the default of its errors."""
        if "codes" in vars(cls):
            cls.default_code = cls.codes[0]

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:  # a message may quote a long text of the client
            message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 4 :]}"
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        if not isinstance(self, CODES.get(self.code, ())):
            raise ValueError(
                f"{self.code!r} is no code of {type(self).__name__}: expected one that its class lists in "
                "common/errors.py"
            )
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the error as JSON values in OpenAI's shape, without words that clients must not see."""
        return {
            "error": {
                "message": _FOR_CLIENTS.get(self.code, self.message),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(SpillwayError):
    """400: the request cannot be understood or is out of limits."""

    http_status = 400
    codes = (
        "invalid_request",
        "bad_message",
        "context_length_exceeded",
        "dimension_mismatch",
        "duplicate_id",
        "empty_input",
        "head_too_large",
        "invalid_body",
        "invalid_chunking",
        "invalid_cursor",
        "invalid_dimensions",
        "invalid_filter",
        "invalid_grammar",
        "invalid_header",
        "invalid_http",
        "invalid_id",
        "invalid_json",
        "invalid_messages",
        "invalid_pages",
        "invalid_path",
        "invalid_session",
        "invalid_token",
        "invalid_utf8",
        "invalid_value",
        "invalid_vector",
        "no_chat_template",
        "no_reranker",
        "no_texts",
        "previous_response_not_found",
        "session_model_mismatch",
        "too_deep",
        "too_many_items",
        "too_many_tokens",
        "unknown_field",
        "unsupported",
        "vectors_only",
        "zero_vector",
    )


class Unauthenticated(SpillwayError):
    """401: no API key, or a wrong one."""

    http_status = 401
    type = "authentication_error"
    codes = ("invalid_api_key", "missing_api_key")


class NotFound(SpillwayError):
    """404: no such object, or it belongs to another tenant."""

    http_status = 404
    codes = (
        "not_found",
        "collection_not_found",
        "document_not_found",
        "key_not_found",
        "model_not_found",
        "request_not_found",
        "response_not_found",
        "route_not_found",
        "session_not_found",
        "shard_not_found",
        "tuning_not_found",
    )


class MethodNotAllowed(SpillwayError):
    """405: the path exists, the method does not."""

    http_status = 405
    codes = ("method_not_allowed",)


class RequestTimeout(SpillwayError):
    """408: the client sent its body too slowly."""

    http_status = 408
    codes = ("request_timeout",)
    retryable = True


class Conflict(SpillwayError):
    """409: the stored state contradicts the request."""

    http_status = 409
    codes = (
        "conflict",
        "collection_busy",
        "collection_changed",
        "collection_exists",
        "encoder_mismatch",
        "fingerprint_mismatch",
        "idempotency_conflict",
        "layout_changed",
        "no_page_tier",
        "pin_over_budget",
        "session_busy",
        "session_changed",
        "session_deleted",
        "shard_busy",
        "tuning_under_way",
    )


class TooLarge(SpillwayError):
    """413: the body or an item exceeds its limit."""

    http_status = 413
    codes = ("too_large", "body_too_large", "pages_too_large", "session_too_large")


class Unprocessable(SpillwayError):
    """422: understood, but it cannot be done with these values."""

    http_status = 422
    codes = (
        "unprocessable",
        "exceeds_depth",
        "grammar_failed",
        "not_embeddable",
        "too_few_processes",
    )


class RateLimited(SpillwayError):
    """429: over depth or quota."""

    http_status = 429
    type = "rate_limit_error"
    codes = ("depth", "deadline", "quota", "tokens")
    retryable = True


class Cancelled(SpillwayError):
    """499: the client cancelled the request, or went away."""

    http_status = 499
    codes = ("cancelled",)


class InternalError(SpillwayError):
    """500: a fault of Spillway."""

    type = "server_error"
    codes: ClassVar[tuple[str, ...]] = ("internal_error",)


class JobFailed(InternalError):
    """500: a job was convicted; the dead letter keeps error and trace."""

    codes = ("job_failed", "bad_entry", "log_damaged", "log_gap", "model_error")


class Unavailable(SpillwayError):
    """503: not able now (draining, no worker, bus away or full)."""

    http_status = 503
    type = "server_error"
    codes = (
        "unavailable",
        "bus_down",
        "bus_full",
        "bus_mixed",
        "disk_full",
        "draining",
        "no_worker",
        "not_applied",
        "pages_down",
        "search_failed",
        "session_running",
        "shard_damaged",
        "shard_missing",
        "storage_failed",
        "template_broken",
        "text_pool_broken",
        "text_pool_busy",
        "too_many_connections",
    )
    retryable = True


class DeadlineExceeded(SpillwayError):
    """504: the deadline passed before the result."""

    http_status = 504
    type = "timeout_error"
    codes = ("deadline_exceeded",)


def _classes(cls: type[SpillwayError]) -> list[type[SpillwayError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _classes(sub))]


_CLASSES = _classes(SpillwayError)
CODES: Mapping[str, type[SpillwayError]] = MappingProxyType(
    {code: cls for cls in _CLASSES for code in cls.codes}
)
# The most general class of each status comes first in the tree, and is kept here.
_BY_STATUS = {cls.http_status: cls for cls in reversed(_CLASSES) if cls is not SpillwayError}


def rebuild(
    code: str,
    message: str,
    *,
    status: int = 0,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> SpillwayError:
    """Return the error with these values, which came over the bus.

    `status` is the HTTP status of the code by the sender (0: the sender's version gave none). It determines the class
    for a code that this version does not know; such an error without a status is an InternalError.
    """
    cls = CODES.get(code) or _BY_STATUS.get(status)
    if cls is None:
        cls = InvalidRequest if 400 <= status < 500 else InternalError
    error = cls(message, param=param, retry_after_s=retry_after_s)
    error.code = code  # a newer version's code: not checked against this version's
    if code not in CODES and 400 <= status < 600:
        error.http_status = status
    return error


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the variable, the value and the expected form."""
