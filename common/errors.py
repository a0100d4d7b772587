"""Every error the mesh can show, in one tree.

SpillwayError
├── InvalidRequest (400)        the request cannot be understood or is out of limits
├── Unauthenticated (401)       no key, or a wrong one
├── NotFound (404)              no such thing, or another tenant's
├── RequestTimeout (408)        the client sent its body too slowly
├── Conflict (409)              what is stored disagrees with what is asked
├── TooLarge (413)              the body or an item exceeds its limit
├── Unprocessable (422)         understood, but it cannot be done with these values
├── Cancelled (499)             the client cancelled, or went away
├── RateLimited (429)           busy: over depth or quota; come back after `retry_after_s`
├── InternalError (500)         our fault
│   └── JobFailed (500)         a job was convicted; its dead letter tells why
├── Unavailable (503)           not able now: draining, no worker, bus away or full
└── DeadlineExceeded (504)      the deadline passed before the result

`code` is what programs match on; the sentence is for people and names what, where and what is expected.
"""

from __future__ import annotations

from typing import Any, ClassVar

MAX_MESSAGE = 1000


class SpillwayError(Exception):
    """Base of every error shown to a client.

    `code` is stable; `param` names the offending field; `retry_after_s` is set where coming back helps.
    """

    http_status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:  # it may quote what a client sent
            message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 4 :]}"
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(SpillwayError):
    """400: the request cannot be understood or is out of limits."""

    http_status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class Unauthenticated(SpillwayError):
    """401: no API key, or a wrong one."""

    http_status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class NotFound(SpillwayError):
    """404: no such thing, or it belongs to another tenant."""

    http_status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowed(SpillwayError):
    """405: the path exists, the method does not."""

    http_status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class RequestTimeout(SpillwayError):
    """408: the client sent its body too slowly."""

    http_status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"
    retryable = True


class Conflict(SpillwayError):
    """409: what is stored disagrees with what is asked."""

    http_status = 409
    type = "invalid_request_error"
    default_code = "conflict"


class TooLarge(SpillwayError):
    """413: the body or an item exceeds its limit."""

    http_status = 413
    type = "invalid_request_error"
    default_code = "too_large"


class Unprocessable(SpillwayError):
    """422: understood, but it cannot be done with these values."""

    http_status = 422
    type = "invalid_request_error"
    default_code = "unprocessable"


class RateLimited(SpillwayError):
    """429: over depth or quota."""

    http_status = 429
    type = "rate_limit_error"
    default_code = "depth"
    retryable = True


class Cancelled(SpillwayError):
    """499: the client cancelled the request, or went away."""

    http_status = 499
    type = "invalid_request_error"
    default_code = "cancelled"


class InternalError(SpillwayError):
    """500: our fault."""


class JobFailed(InternalError):
    """500: a job was convicted; the dead letter keeps error and trace."""

    default_code = "job_failed"


class Unavailable(SpillwayError):
    """503: not able now (draining, no worker, bus away or full)."""

    http_status = 503
    default_code = "unavailable"
    retryable = True


class DeadlineExceeded(SpillwayError):
    """504: the deadline passed before the result."""

    http_status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"


def _leaves(cls: type[SpillwayError]) -> list[type[SpillwayError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _leaves(sub))]


def from_code(code: str, message: str) -> SpillwayError:
    """Rebuild an error that crossed the bus as (code, message); unknown codes are internal errors."""
    for cls in _leaves(SpillwayError):
        if cls.default_code == code:
            return cls(message, code=code)
    return InternalError(message, code=code)


class ConfigError(Exception):
    """A configuration that cannot be used; the message names variable, value and what is expected."""
