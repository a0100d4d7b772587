"""Traces by OpenTelemetry's API, which does nothing unless its SDK is installed (the extra `otel`) and configured.

A W3C `traceparent` crosses the bus, "" where no trace is known. A client's trace is passed on even if traces are off,
so that logs and requests name it. No span holds text of users or models.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common import log
from common.metrics import version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | int | float | bool]
NONE = trace.INVALID_SPAN
STOP_S = 3.0
_PROTOCOL = "http/protobuf"
_PROPAGATOR = TraceContextTextMapPropagator()
_TRACER = trace.get_tracer("spillway", version())
_provider: TracerProvider | None = None


def on() -> bool:
    """Return whether this process records spans."""
    return _provider is not None


def current() -> Span:
    """Return the current span of this task; NONE without one."""
    return trace.get_current_span()


def remote(traceparent: str) -> Span:
    """Return another process' span by its traceparent; NONE if the text has not W3C's form."""
    if not traceparent:
        return NONE
    return trace.get_current_span(_PROPAGATOR.extract({"traceparent": traceparent}, Context()))


def traceparent(span: Span) -> str:
    """Return the traceparent by which another process names this span, "" for NONE."""
    if span is NONE:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def trace_id(span: Span) -> str:
    """Return the 32 hexadecimal digits of the span's trace, "" for NONE."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def use(span: Span) -> contextlib.AbstractContextManager[Span]:
    """Make a span the current one of this task, and of the tasks that it starts, within the block."""
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def start(
    name: str,
    kind: Kind,
    parent: Span,
    *,
    links: Iterable[Span] = (),
    attributes: Attributes | None = None,
    since_ns: int | None = None,
) -> Span:
    """Begin a span below `parent` (NONE: a new trace); the caller ends the span.

    `since_ns` is when the span began, in nanoseconds since the epoch, if not now.
    """
    return _TRACER.start_span(
        name,
        trace.set_span_in_context(parent, Context()),
        trace.SpanKind[kind.upper()],
        attributes,
        [trace.Link(each.get_span_context()) for each in links],
        since_ns,
    )


def fail(span: Span, error: str) -> None:
    """Mark a span as failed by an error's code or class; the error's message may hold text of users."""
    span.set_attribute("error.type", error)
    span.set_status(trace.StatusCode.ERROR)


def span(
    name: str, kind: Kind = "internal", attributes: Attributes | None = None, *, ends: bool = True
) -> contextlib.AbstractContextManager[Span]:
    """Make a span below the current one, current itself within the block, and end it with the block.

    With `ends` False the caller ends the span later, or leaves it unsent; an error in the block always ends it.
    """
    if not on():  # a span without effect would only become the current one
        return contextlib.nullcontext(current())
    return _recorded(name, kind, attributes, ends=ends)


@contextlib.contextmanager
def _recorded(
    name: str, kind: Kind, attributes: Attributes | None, *, ends: bool
) -> Iterator[Span]:
    made = start(name, kind, current(), attributes=attributes)
    try:
        with use(made):
            yield made
    except BaseException as error:
        fail(made, type(error).__name__)
        made.end()
        raise
    if ends:
        made.end()


# -- the process ------------------------------------------------------------------------------------------


def setup(service: str, env: Mapping[str, str]) -> None:
    """Send this process' spans where OpenTelemetry's OTEL_* variables say; without an exporter there, nowhere.

    If the exporter cannot be loaded, that is logged and traces stay off.
    """
    global _provider  # noqa: PLW0603 - one provider a process
    where = _exporter(env)
    if where in {"", "none"} or env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    name = "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get(name) or _PROTOCOL
    if where not in {"otlp", "console"}:
        _refuse(f"OTEL_TRACES_EXPORTER is {where!r}: expected otlp, console or none")
        return
    if where == "otlp" and protocol != _PROTOCOL:
        _refuse(f"{name} is {protocol!r}: expected {_PROTOCOL}")
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import (  # noqa: PLC0415
            BatchSpanProcessor,
            ConsoleSpanExporter,
            SpanExporter,
        )
    except ImportError:
        _refuse("OpenTelemetry's SDK is not installed: pip install 'spillway[otel]'")
        return
    exporter: SpanExporter
    if where == "console":
        exporter = ConsoleSpanExporter(formatter=lambda one: f"{one.to_json(indent=None)}\n")
    else:
        exporter = OTLPSpanExporter()
    resource = {
        "service.name": service,
        "service.namespace": "spillway",
        "service.version": version(),
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
    }
    _provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(_provider)


def _refuse(why: str) -> None:
    log.get("tracing").warning("traces_off", why=why)


def _exporter(env: Mapping[str, str]) -> str:
    named = env.get("OTEL_TRACES_EXPORTER", "").strip()
    ends = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return named or ("otlp" if any(env.get(end) for end in ends) else "")


def stop() -> None:
    """Send the spans that are left, for at most STOP_S: a collector that is away must not hold up the process' end."""
    global _provider  # noqa: PLW0603
    if _provider is not None:
        ending = threading.Thread(target=_provider.shutdown, daemon=True)
        ending.start()
        ending.join(STOP_S)
    _provider = None
