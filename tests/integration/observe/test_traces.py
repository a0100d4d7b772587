"""One trace from the client over router, workers and search, sent by real processes to a real receiver."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from common import tracing
from tests.support.chat import post, stream
from tests.support.collector import Collector, Seen
from tests.support.mesh import ROOT, Mesh

SECRET = "the heron nests upstream"
CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STEP_S = 0.02


class Traced(Mesh):
    """A mesh whose processes send their spans to `collector`."""

    def __init__(self, collector: Collector) -> None:
        before = dict(os.environ)
        os.environ |= collector.env
        try:
            super().__init__()
            self.chat = self.add_generator(beta=STEP_S)
        finally:
            os.environ.clear()
            os.environ |= before
        self.collector = collector


@pytest.fixture(scope="module")
def mesh() -> Iterator[Traced]:
    collector = Collector()
    made = None
    try:
        made = Traced(collector)
        yield made
    finally:
        if made is not None:
            made.close()
        collector.close()


@pytest.fixture
async def http(mesh: Traced) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(mesh.url, timeout=timeout) as session:
        yield session


class Client:
    """A caller with a trace of its own."""

    def __init__(self, flags: str = "01") -> None:
        self.trace, self.span = secrets.token_hex(16), secrets.token_hex(8)
        self.header = {"traceparent": f"00-{self.trace}-{self.span}-{flags}"}


def tree(spans: list[Seen]) -> dict[tuple[str, str, str], str]:
    """Return (service, kind, name) -> the parent's name, of each span; "" where the parent is none of them."""
    names = {span.id: span.name for span in spans}
    return {(span.service, span.kind, span.name): names.get(span.parent, "") for span in spans}


def asks(**more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"{SECRET}?"}
    return {"model": "sim-chat", "messages": [message], "max_tokens": 12, **more}


async def test_a_grounded_answer_is_one_trace(mesh: Traced, http: aiohttp.ClientSession) -> None:
    """Each hop over the bus is a producer and its consumer, under the caller's own span; no text is in any of them."""
    await post(http, {"name": "pages"}, "/v1/collections")
    texts = [{"id": f"d{n}", "text": f"{SECRET} {n}"} for n in range(5)]
    await post(http, {"documents": texts}, "/v1/collections/pages/documents")
    client = Client()
    body = asks(retrieval={"collection": "pages"}, max_tokens=12)
    _, headers = await stream(http, body, **client.header)
    spans = await asyncio.to_thread(
        mesh.collector.trace, client.trace, enough=lambda s: len(s) >= 11
    )
    async with http.get(f"/v1/requests/{headers['x-request-id']}") as response:
        told = await response.json()
    found = {span.name: span for span in spans}

    assert len(spans) == 11
    assert tree(spans) == {
        ("router", "server", "POST /v1/chat/completions"): "",
        ("router", "producer", "admit request"): "POST /v1/chat/completions",
        ("router", "consumer", "request chat"): "admit request",
        ("router", "producer", "admit embed"): "request chat",
        ("gpu_worker", "consumer", "embeddings sim"): "admit embed",
        ("gpu_worker", "internal", "batch"): "embeddings sim",
        ("router", "producer", "admit search"): "request chat",
        ("vector_search", "consumer", "process search"): "admit search",
        ("vector_search", "internal", "batch"): "process search",
        ("router", "producer", "admit chat"): "request chat",
        ("gpu_worker", "consumer", "generate_content sim-chat"): "admit chat",
    }
    assert found["POST /v1/chat/completions"].parent == client.span
    assert told["trace_id"] == client.trace
    answer = found["generate_content sim-chat"]
    assert answer.events == ("first token",)
    assert answer.told["gen_ai.usage.output_tokens"] == 12
    assert answer.told["gen_ai.request.model"] == "sim-chat"
    assert (answer.told["spillway.attempt"], answer.told["spillway.outcome"]) == (1, "ok")
    server = found["POST /v1/chat/completions"].told
    assert server["gen_ai.operation.name"] == "chat"
    assert server["http.response.status_code"] == 200
    assert server["spillway.request_id"] == headers["x-request-id"]
    assert not any(SECRET.split()[1].encode() in raw for raw in mesh.collector.raw)


async def test_a_search_by_a_call_is_in_the_trace(
    mesh: Traced, http: aiohttp.ClientSession
) -> None:
    """A search that goes straight to its process has a span at both ends of the call."""
    await post(http, {"name": "calls", "model": None, "dimension": 4}, "/v1/collections")
    rows = [{"id": f"d{n}", "vector": [n, 1, 0, 0]} for n in range(5)]
    await post(http, {"documents": rows}, "/v1/collections/calls/documents")
    async with asyncio.timeout(60):
        while True:  # the first searches go by jobs, until the router has reached the process
            client = Client()
            query = {"vector": [1, 1, 0, 0], "k": 2}
            await post(http, query, "/v1/collections/calls/search", **client.header)
            spans = await asyncio.to_thread(
                mesh.collector.trace, client.trace, enough=lambda s: len(s) >= 3
            )
            if ("vector_search", "server", "search") in tree(spans):
                break
    assert tree(spans) == {
        ("router", "server", "POST /v1/collections/{name}/search"): "",
        ("router", "client", "search"): "POST /v1/collections/{name}/search",
        ("vector_search", "server", "search"): "search",
    }


async def test_a_batch_is_linked_to_its_jobs(mesh: Traced, http: aiohttp.ClientSession) -> None:
    """Jobs computed together share one span, under the first of them and linked to all."""
    clients = [Client() for _ in range(40)]
    body = {"input": "x " * 40, "model": "sim"}
    await asyncio.gather(*(post(http, body, "/v1/embeddings", **one.header) for one in clients))

    def split(spans: list[Seen]) -> tuple[list[str], list[Seen]]:
        jobs = [span.id for span in spans if span.kind == "consumer"]
        return sorted(jobs), [span for span in spans if span.name == "batch"]

    def enough(spans: list[Seen]) -> bool:
        jobs, batches = split(spans)
        return len(jobs) >= 40 <= sum(len(batch.links) for batch in batches)

    spans = await asyncio.to_thread(
        mesh.collector.trace, *(one.trace for one in clients), enough=enough
    )
    jobs, batches = split(spans)
    assert all(batch.links[0] == batch.parent for batch in batches)
    assert sorted(link for batch in batches for link in batch.links) == jobs
    assert len(jobs) == len(clients)
    assert max(len(batch.links) for batch in batches) > 1


async def test_what_is_not_sampled_is_not_sent(mesh: Traced, http: aiohttp.ClientSession) -> None:
    """A caller that says so is not recorded anywhere, but its trace is still named."""
    quiet, loud = Client("00"), Client()
    _, headers = await stream(http, asks(), **quiet.header)
    await stream(http, asks(), **loud.header)
    await asyncio.to_thread(mesh.collector.trace, loud.trace, enough=lambda s: len(s) >= 3)
    async with http.get(f"/v1/requests/{headers['x-request-id']}") as response:
        told = await response.json()

    assert told["trace_id"] == quiet.trace
    assert mesh.collector.trace(quiet.trace, enough=lambda _: True) == []


async def test_a_killed_worker_leaves_its_attempt(
    mesh: Traced, http: aiohttp.ClientSession
) -> None:
    """The stream goes on at another worker, in the same trace; the attempt that was lost is told by its finder."""
    client = Client()
    body = asks(max_tokens=150, stream=True, ignore_eos=True)
    async with http.post("/v1/chat/completions", json=body, headers=client.header) as response:
        raw, killed = b"", False
        async for chunk in response.content.iter_any():
            raw += chunk
            if not killed and raw.count(b"data: ") > 10:
                killed = True
                await asyncio.to_thread(mesh.chat.kill)
                mesh.chat.start()
    assert raw.endswith(b"data: [DONE]\n\n")

    def both(spans: list[Seen]) -> bool:
        kinds = [span.kind for span in spans]
        return kinds.count("consumer") >= 2 and "producer" in kinds

    spans = await asyncio.to_thread(mesh.collector.trace, client.trace, enough=both)
    lost, kept = sorted(
        (span for span in spans if span.kind == "consumer"),
        key=lambda span: span.told["spillway.attempt"],
    )
    producer = next(span for span in spans if span.kind == "producer")

    assert (lost.parent, kept.parent) == (producer.id, producer.id)
    assert (lost.failed, kept.failed) == (True, False)
    assert lost.told["spillway.outcome"] == lost.told["error.type"] == "worker_lost"
    assert kept.told["spillway.outcome"] == "ok"
    assert [span.told["spillway.attempt"] for span in (lost, kept)] == [1, 2]
    assert lost.told["spillway.worker"] != kept.told["spillway.worker"]
    assert lost.told["messaging.message.id"] == kept.told["messaging.message.id"]
    lines = [json.loads(line) for line in mesh.chat.log.read_text().splitlines() if line[:1] == "{"]
    named = {line["event"] for line in lines if line.get("trace_id") == client.trace}
    assert {"lease_settled", "job_taken_over"} <= named


# -- without -----------------------------------------------------------------------------------------------


def _run(code: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_services_need_none_of_it() -> None:
    """Without OpenTelemetry's SDK everything else is imported, and spans do nothing but pass a client's trace on."""
    _run(
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "import os, services.router.service, services.kv_store.service, services.adapters.worker\n"
        "from common import tracing\n"
        "tracing.setup('router', os.environ)\n"
        "with tracing.span('x') as span: span.set_attributes({'a': 1})\n"
        "assert not tracing.on()\n"
        "assert not tracing.start('y', 'consumer', tracing.NONE).is_recording()\n"
        f"client = tracing.remote({CLIENT!r})\n"
        "with tracing.use(client), tracing.span('z') as span:\n"
        "    assert tracing.current() is span\n"
        f"    assert tracing.traceparent(span) == {CLIENT!r}\n"
        "assert tracing.traceparent(tracing.current()) == ''\n"
    )


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, "not installed: pip install"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin': expected otlp, console or none"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf"),
    ],
)
def test_what_cannot_be_had_is_said(env: dict[str, str], why: str) -> None:
    """The service starts all the same, without traces."""
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "import logging; logging.basicConfig(stream=sys.stdout)\n"
        "from common import tracing\n"
        f"tracing.setup('router', {env!r})\n"
        "assert not tracing.on()\n"
    )

    assert why in _run(code)


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (CLIENT, "4bf92f3577b34da6a3ce929d0e0e4736"),
        (f"{CLIENT}\n", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", ""),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", ""),
        ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", ""),
        ("", ""),
    ],
)
def test_which_headers_name_a_trace(header: str, trace: str) -> None:
    """Those of W3C's form, white space around it aside; anything else is as none."""
    found = tracing.remote(header)

    assert tracing.trace_id(found) == trace
    assert tracing.traceparent(found) == (CLIENT if trace else "")
