"""The panel "Attention on the host" in a real browser, over a worker that attends to its sequences on the host."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bench.engine import random_models
from tests.support.mesh import Mesh

STREAMS = 4
WORDS = re.compile(
    r"decoding rows?, \d+ attended on the host \(\d+ % since the start\); \d layers predicted to take .+, took .+"
)


class HostAttending(Mesh):
    """A gpu_worker in the mode of FastDecode and a router."""

    def _start(self) -> None:
        model = self.directory / "m"
        random_models.write(model, "llama", random_models.settings("llama", 2))
        flags = (
            "--embed-model",
            "none",
            "--chat-model",
            str(model),
            "--device",
            "cpu",
            "--threads",
            "1",
        )
        sizes = ("--kv-bytes", str(1 << 20), "--host-kv-bytes", str(4 << 20))
        self.add(
            "gpu_worker", "0", *flags, *sizes, "--chat-dtype", "fp32", "--host-attention", "full"
        )
        self.url = self.address(self.add_router("0"))
        self.wait_ready(self.url)
        self.wait_model(self.url, "generate")

    def get(self, path: str) -> Any:
        """Return a route's JSON."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return json.loads(answer.read())

    def complete(self, number: int) -> int:
        """Send one prompt and return how many tokens its answer has."""
        [model] = [each["id"] for each in self.get("/v1/models")["data"]]
        prompt = [3 + number + at % 7 for at in range(40)]
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            tokens: int = json.loads(answer.read())["usage"]["completion_tokens"]
        return tokens


@pytest.fixture(scope="module")
def attending() -> Iterator[HostAttending]:
    made = HostAttending()
    try:
        yield made
    finally:
        made.close()


def test_the_stages_of_a_step(page: Page, attending: HostAttending) -> None:
    """Hidden until a step is told; then both sides' stages, what was predicted and measured, and what was idle."""
    page.goto(f"{attending.url}/#/mesh")
    expect(page.locator("#state .words")).to_have_text("live")
    panel = page.locator("section[aria-label='Attention on the host']")
    expect(panel).to_be_hidden()

    with ThreadPoolExecutor(STREAMS) as threads:
        assert all(threads.map(attending.complete, range(STREAMS)))
    expect(panel).to_be_visible()
    expect(panel.locator(".under").first).to_have_text(WORDS)
    # The same prompts once more: their first pages stand on the host.
    with ThreadPoolExecutor(STREAMS) as threads:
        assert all(threads.map(attending.complete, range(STREAMS)))
    name = panel.locator(".staged-step strong").first
    expect(name).to_contain_text(f"since the start: {STREAMS} attended in place")
    for side in ("device", "host"):
        row = panel.locator(f"[data-side={side}]")
        expect(row.locator(".segment").first).to_be_attached()
        expect(row.locator(".gantt-name .under")).to_contain_text("idle")
    expect(panel.locator("[data-side=device] .segment:not(.attends)").first).to_be_attached()
    expect(panel.locator("[data-side=host] .segment:not(.attends)")).to_have_count(0)

    [step] = [worker["step"] for worker in attending.get("/v1/mesh")["workers"] if "step" in worker]
    assert {layer for _, _, layer, _, _ in step["stages"]} == set(range(step["layers"]))
    assert 0 < step["on_host"] <= step["decoded"] <= STREAMS
    begins = [begin for *_, begin, _ in step["stages"]]
    assert min(begins) == 0
    assert all(begin <= end <= step["measured_s"] for *_, begin, end in step["stages"])
