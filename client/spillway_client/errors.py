"""All errors that a call can raise, in one tree.

SpillwayError
├── InvalidInputError (also ValueError)   refused here, nothing was sent
├── APIConnectionError                    no answer: refused, reset, name not found
│   └── APITimeoutError                   the call's own deadline passed without an answer
└── APIStatusError                        the server answered with an error
    ├── BadRequestError (400, 405)
    ├── AuthenticationError (401)
    ├── PermissionDeniedError (403)
    ├── NotFoundError (404)
    ├── RequestTimeoutError (408)
    ├── ConflictError (409)
    ├── TooLargeError (413)
    ├── UnprocessableEntityError (422)
    ├── RateLimitError (429)
    ├── CancelledRequestError (499)
    └── InternalServerError (500 and above)
        ├── UnavailableError (503)
        └── DeadlineExceededError (504)
"""

from __future__ import annotations

from typing import Any


class SpillwayError(Exception):
    """Base of every error of this package."""


class InvalidInputError(SpillwayError, ValueError):
    """An argument that no server accepts; nothing was sent."""


class APIConnectionError(SpillwayError):
    """The server could not be reached, or the connection broke before the whole answer came."""


class APITimeoutError(APIConnectionError):
    """The call's deadline (`timeout_s`) passed before an answer came."""


class APIStatusError(SpillwayError):
    """The server answered with an error.

    `code` is stable and meant for programs; `request_id` finds the request in the server's logs; `body` is the decoded
    JSON, or the text; `retry_after_s` is the wait in seconds that the server asks for, None without one.
    """

    def __init__(
        self,
        message: str,
        *,
        status_code: int,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        body: Any = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.code = code
        self.param = param
        self.request_id = request_id
        self.body = body
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.status_code} {self.code or 'error'}: {self.message}{request}"


class BadRequestError(APIStatusError):
    """400: the request cannot be understood or is out of limits."""


class AuthenticationError(APIStatusError):
    """401: no API key, or a wrong one."""


class PermissionDeniedError(APIStatusError):
    """403: the key may not do this."""


class NotFoundError(APIStatusError):
    """404: no such object, or another tenant's."""


class RequestTimeoutError(APIStatusError):
    """408: the body was sent too slowly."""


class ConflictError(APIStatusError):
    """409: the stored state contradicts the request."""


class TooLargeError(APIStatusError):
    """413: the body or an item exceeds its limit."""


class UnprocessableEntityError(APIStatusError):
    """422: understood, but it cannot be done with these values."""


class RateLimitError(APIStatusError):
    """429: busy, or over the key's quota; try again after `retry_after_s` seconds."""


class CancelledRequestError(APIStatusError):
    """499: the request was cancelled."""


class InternalServerError(APIStatusError):
    """500 and above: the server's fault."""


class UnavailableError(InternalServerError):
    """503: not able now (starting, draining, no worker, bus away or full)."""


class DeadlineExceededError(InternalServerError):
    """504: the request's deadline passed before its result."""


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    405: BadRequestError,
    408: RequestTimeoutError,
    409: ConflictError,
    413: TooLargeError,
    422: UnprocessableEntityError,
    429: RateLimitError,
    499: CancelledRequestError,
    503: UnavailableError,
    504: DeadlineExceededError,
}


def class_for(status: int) -> type[APIStatusError]:
    """Return the class of an HTTP status."""
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return InternalServerError if status >= 500 else APIStatusError


def from_response(
    status: int, body: Any, *, request_id: str | None = None, retry_after_s: float | None = None
) -> APIStatusError:
    """Build the error of an answer; bodies that are not Spillway's (a proxy's page) become its text."""
    error = body.get("error") if isinstance(body, dict) else None
    details: dict[str, Any] = error if isinstance(error, dict) else {}
    message = details.get("message") or (error if isinstance(error, str) else None)
    text = body if isinstance(body, str) else ""
    return class_for(status)(
        str(message or text[:500].strip() or f"HTTP status {status}"),
        status_code=status,
        code=details.get("code"),
        param=details.get("param"),
        request_id=request_id,
        body=body,
        retry_after_s=retry_after_s,
    )


def from_frame(body: Any, *, request_id: str | None = None) -> APIStatusError:
    """Build the error of an error frame in mid-stream; the frame has the HTTP status for the error."""
    error = body.get("error") if isinstance(body, dict) else None
    status = error.get("status") if isinstance(error, dict) else None
    return from_response(status if isinstance(status, int) else 500, body, request_id=request_id)
