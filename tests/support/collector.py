"""A receiver of OTLP over HTTP, as a collector is one: what it was sent can be asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

WAIT_S = 60.0


class Seen(NamedTuple):
    """One span as it arrived; ids in hexadecimal, `links` to span ids."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    events: tuple[str, ...]
    failed: bool
    told: dict[str, Any]
    seconds: float


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def _seen(service: str, span: Span) -> Seen:
    return Seen(
        service,
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple(link.span_id.hex() for link in span.links),
        tuple(event.name for event in span.events),
        span.status.code == Status.STATUS_CODE_ERROR,
        {pair.key: _value(pair.value) for pair in span.attributes},
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


class Collector:
    """Listens on a port of its own from the start on; `raw` is everything that came."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self._spans: list[Seen] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def env(self) -> dict[str, str]:
        """What makes a process send its spans here, and soon."""
        url = f"http://127.0.0.1:{self._server.server_port}"
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "200"}

    def take(self, body: bytes) -> None:
        """Take one export."""
        self.raw.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {pair.key: _value(pair.value) for pair in group.resource.attributes}
            assert resource["service.namespace"] == "spillway"
            for scope in group.scope_spans:
                self._spans += [_seen(resource["service.name"], span) for span in scope.spans]

    def trace(self, *traces: str, enough: Callable[[list[Seen]], bool]) -> list[Seen]:
        """Return the spans of one or more traces, once they are enough; what there is after WAIT_S."""
        give_up = time.monotonic() + WAIT_S
        while True:
            found = [span for span in list(self._spans) if span.trace in traces]
            if enough(found) or time.monotonic() > give_up:
                return found
            time.sleep(0.05)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
