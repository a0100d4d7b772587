"""Traces by OpenTelemetry: nothing but one `if` unless its extra is installed and an exporter is configured.

What crosses the bus is a W3C `traceparent`, "" where there is none. Where traces are off a client's is carried on all
the same, so that logs and requests name its trace. What users and models write is never in a span.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from common.metrics import version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | int | float | bool]
STOP_S = 3.0
_PROTOCOL = "http/protobuf"
_FORM = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_provider: TracerProvider | None = None
_tracer: Tracer | None = None


class Span:
    """One span, or no more than the trace that is carried on; every method may be called either way."""

    __slots__ = ("_otel", "traceparent")

    def __init__(self, traceparent: str, otel: OtelSpan | None = None) -> None:
        self.traceparent, self._otel = traceparent, otel

    @property
    def trace_id(self) -> str:
        """The trace's 32 hexadecimal digits, "" without one."""
        return self.traceparent[3:35]

    @property
    def recorded(self) -> bool:
        """True if the span will be exported."""
        return self._otel is not None and self._otel.is_recording()

    def name(self, name: str, attributes: Attributes | None = None) -> None:
        """Give it a better name, and attributes."""
        if self._otel is not None:
            self._otel.update_name(name)
            self._otel.set_attributes(attributes or {})

    def set(self, attributes: Attributes) -> None:
        """Give it attributes."""
        if self._otel is not None:
            self._otel.set_attributes(attributes)

    def event(self, name: str) -> None:
        """Note that something happened now."""
        if self._otel is not None:
            self._otel.add_event(name)

    def fail(self, error: str) -> None:
        """Say that it failed, and by what code or class of error."""
        if self._otel is not None:
            from opentelemetry.trace import StatusCode  # noqa: PLC0415 - where it is installed only

            self._otel.set_attribute("error.type", error)
            self._otel.set_status(StatusCode.ERROR)

    def drop(self) -> None:
        """Forget it: what it told was nothing."""
        self._otel = None

    def end(self) -> None:
        """End it now."""
        if self._otel is not None:
            self._otel.end()


NONE = Span("")
_current: ContextVar[Span] = ContextVar("span", default=NONE)


def on() -> bool:
    """Return whether spans are made here."""
    return _tracer is not None


def current() -> Span:
    """Return the span, or the trace, that this task works for."""
    return _current.get()


def accepted(header: str) -> Span:
    """Return the trace a client's `traceparent` header names; NONE where it has another form than version 00's."""
    return Span(header) if _FORM.fullmatch(header) else NONE


def trace_id(traceparent: str) -> str:
    """Return a traceparent's trace id, "" without one."""
    return traceparent[3:35]


@contextlib.contextmanager
def use(span: Span) -> Iterator[Span]:
    """Make a span the current one of this task, and of tasks that it begins, within the block."""
    token = _current.set(span)
    try:
        yield span
    finally:
        _current.reset(token)


def start(
    name: str,
    kind: Kind,
    parent: str,
    *,
    links: Iterable[str] = (),
    attributes: Attributes | None = None,
    since_ns: int | None = None,
) -> Span:
    """Begin a span under the traceparent `parent` ("": a new trace), which its caller ends.

    `since_ns` is when it began, by time.time_ns(), if not now.
    """
    if _tracer is None:
        return Span(parent) if parent else NONE
    from opentelemetry import trace  # noqa: PLC0415 - where it is installed only

    linked = (trace.get_current_span(_context(one)).get_span_context() for one in links)
    otel = _tracer.start_span(
        name,
        _context(parent),
        trace.SpanKind[kind.upper()],
        attributes,
        [trace.Link(one) for one in linked],
        since_ns,
    )
    made = otel.get_span_context()
    return Span(f"00-{made.trace_id:032x}-{made.span_id:016x}-{made.trace_flags:02x}", otel)


@contextlib.contextmanager
def _within(name: str, kind: Kind, attributes: Attributes | None) -> Iterator[Span]:
    made = start(name, kind, current().traceparent, attributes=attributes)
    try:
        with use(made):
            yield made
    except BaseException as error:
        made.fail(type(error).__name__)
        raise
    finally:
        made.end()


def span(
    name: str, kind: Kind = "internal", attributes: Attributes | None = None
) -> contextlib.AbstractContextManager[Span]:
    """Make a span under the current one, current itself within the block and ended with it."""
    if _tracer is None:
        return contextlib.nullcontext(NONE)
    return _within(name, kind, attributes)


def _context(traceparent: str) -> Context:
    from opentelemetry import trace  # noqa: PLC0415 - where it is installed only
    from opentelemetry.context import Context  # noqa: PLC0415

    match = _FORM.fullmatch(traceparent)
    if match is None:
        return Context()
    trace_number, span_number, flags = (int(part, 16) for part in match.groups())
    remote = trace.SpanContext(trace_number, span_number, True, trace.TraceFlags(flags))  # noqa: FBT003
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())


# -- the process ------------------------------------------------------------------------------------------


def setup(service: str, env: Mapping[str, str]) -> None:
    """Send this process' spans where OpenTelemetry's OTEL_* variables say; without an exporter there, nowhere.

    What is asked for and cannot be had is logged, and traces stay off.
    """
    global _provider, _tracer  # noqa: PLW0603 - one a process, as its logs
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
        _refuse("OpenTelemetry is not installed: pip install 'spillway[otel]'")
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
    _tracer = _provider.get_tracer("spillway", version())


def _refuse(why: str) -> None:
    from common import log  # noqa: PLC0415 - whose lines name the current trace

    log.get("tracing").warning("traces_off", why=why)


def _exporter(env: Mapping[str, str]) -> str:
    named = env.get("OTEL_TRACES_EXPORTER", "").strip()
    ends = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return named or ("otlp" if any(env.get(end) for end in ends) else "")


def stop() -> None:
    """Send what is left, for at most STOP_S: a collector that is away must not hold up the end of the process."""
    global _provider, _tracer  # noqa: PLW0603
    if _provider is not None:
        ending = threading.Thread(target=_provider.shutdown, daemon=True)
        ending.start()
        ending.join(STOP_S)
    _provider = _tracer = None
