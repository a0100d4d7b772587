"""A real instance with the shipped models, a router beside it that wants keys, and headless Chromium."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.integration.cli.conftest import ROOT, Spillway
from tests.support.mesh import Mesh, Process

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HOSTILE = '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 2"><b>stars</b>'
DOCUMENTS = [
    {
        "id": "boutune.md",
        "text": "# Boutune\n\nBoutune is a wooden ship. Boutune mostly carries cement. A bell hangs at the "
        "bow. Proutan Brouser is in command. Boutune calls Fondor its home port.",
    },
    {
        "id": "prutholm.md",
        "text": "# Prutholm\n\nPrutholm is a quiet town in a valley. Prutholm draws its water from the river "
        "Krisia. It has Romel Thomen as mayor. Visitors come to the town for the old bridge over the river. "
        "The chief export of Prutholm is wine.",
    },
    {"id": '<img src=x onerror="window.pwned = 3">', "text": f"A hostile page of stars: {HOSTILE}"},
]


class Instance:
    """`spillway up`, and what tests do to it."""

    def __init__(self, spillway: Spillway) -> None:
        self.spillway = spillway
        # One worker has all models: what loads twice starts twice as slowly.
        words = ("up", "--detach", "--port", "0", "--no-sample")
        done = spillway.run(*words, timeout=330, SPILLWAY_OVERFLOW_WORKERS="0")
        assert done.returncode == 0, done.stdout + done.stderr
        self.url = done.stdout.split("ready at ")[1].split()[0]
        self.redis_url = f"unix://{spillway.data_dir / 'redis.sock'}"
        self._processes: list[Process] = []

    def post(self, path: str, body: Any) -> Any:
        """Send a request and return its answer's JSON."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def get(self, path: str) -> Any:
        """Return a route's JSON."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.loads(answer.read())

    def delete(self, path: str) -> None:
        """Delete what a route names."""
        request = urllib.request.Request(self.url + path, method="DELETE")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def content(self, request: str) -> str:
        """Return what a generation has said, from its log."""
        url = f"{self.url}/v1/requests/{request}/events"
        with urllib.request.urlopen(url, timeout=60) as stream:
            lines = stream.read().decode().splitlines()
        data = [line[6:] for line in lines if line.startswith('data: {"id"')]
        chunks = [json.loads(text)["choices"] for text in data]
        return "".join(c["delta"].get("content") or "" for choices in chunks for c in choices)

    def beside(self, service: str, instance: str, *flags: str) -> Process:
        """Start another process of the mesh, which the supervisor knows nothing of."""
        made = Process(service, self.spillway.data_dir, self.redis_url, instance, *flags).start()
        self._processes.append(made)
        return made

    def end(self) -> None:
        """End everything."""
        for made in self._processes:
            if made.process is not None and made.process.poll() is None:
                made.kill()


@pytest.fixture(autouse=True)
def patience() -> None:
    """A loaded machine is slow; what never comes fails all the same."""
    expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """An instance with the collection `notes`."""
    spillway = Spillway(ROOT, tmp_path_factory.mktemp("dashboard") / "data")
    try:
        made = Instance(spillway)
        made.post("/v1/collections", {"name": "notes"})
        made.post("/v1/collections/notes/documents", {"documents": DOCUMENTS})
        yield made
        made.end()
    finally:
        spillway.clean_up()


@pytest.fixture
def keyed(instance: Instance) -> Iterator[str]:
    """The URL of a router that wants keys."""
    router = instance.beside("router", "keyed", "--port", "0", "--keys", "on", "--drain-s", "5")
    url = Mesh.address(router)
    Mesh.wait_ready(url)
    yield url
    assert router.stop() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is missing; `make setup-full` installs it")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def wrong() -> list[str]:
    """What the page complained of: uncaught errors, and what its policy refused."""
    return []


@pytest.fixture
def page(browser: Browser, wrong: list[str]) -> Iterator[Page]:
    """A page of a fresh profile; an uncaught error in it fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    made = context.new_page()
    made.set_default_timeout(60_000)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on(
        "console",
        lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None,
    )
    made.on(
        "requestfailed",
        lambda failed: wrong.append(failed.url) if "/dashboard/" in failed.url else None,
    )
    yield made
    context.close()
    assert wrong == []
