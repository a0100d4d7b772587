"""Logs: one JSON object a line, or coloured lines on a terminal, both without secrets."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import trace

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from common.config import Common

_SECRET_NAMES = frozenset(
    {"authorization", "password", "secret", "api_key", "token_secret", "host_secret"}
)
_SECRET_TEXT = re.compile(r"(sk-sw-[A-Za-z0-9]+-)[A-Za-z0-9_-]+|(://[^:/@\s]*:)[^@\s]+(?=@)")


def mask(text: str) -> str:
    """Return the text without the secrets of API keys and of URLs with passwords."""
    return _SECRET_TEXT.sub(r"\1\2***", text)


def _without_secrets(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if name.lower() in _SECRET_NAMES:
            event[name] = "***"
        elif isinstance(value, str):
            event[name] = mask(value)
    return event


def _with_trace(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event.setdefault("trace_id", trace.format_trace_id(context.trace_id))
    return event


def setup(service: str, config: Common) -> None:
    """Send this process' logs to stderr, from its own code and from libraries.

    Lines written during a request's work have the request's `trace_id`, if it has one.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _with_trace,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.StackInfoRenderer(),
    ]
    render: list[structlog.typing.Processor]
    if config.log_format == "json" or (config.log_format == "auto" and not sys.stderr.isatty()):
        json = structlog.processors.JSONRenderer(default=repr, ensure_ascii=False)
        render = [structlog.processors.format_exc_info, _without_secrets, json]
    else:
        render = [_without_secrets, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    level = getattr(logging, config.log_level.upper())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, logging.WARNING))  # libraries: warnings only
    logging.getLogger("spillway").setLevel(level)
    structlog.contextvars.bind_contextvars(service=service)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of one part of the product; it may be made before `setup` runs."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(f"spillway.{name}")
    return logger
