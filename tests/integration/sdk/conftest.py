"""A real mesh with two routers and a chat model on the sim device, for the SDK and the commands that use it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from cli.main import main
from tests.support.mesh import Mesh


class TalkingMesh(Mesh):
    """Redis, a gpu_worker that embeds and generates, vector_search, kv_store, and two routers."""

    def _start(self) -> None:
        worker = ("--device", "sim", "--alpha", "0.0002", "--threads", "1", "--chat-model", "sim")
        self.worker = self.add("gpu_worker", "0", *worker)
        self.search = self.add("vector_search", "0")
        self.store = self.add("kv_store", "0")
        self.routers = [self.add_router("0"), self.add_router("1")]
        self.router = self.routers[0]
        self.urls = [self.address(router) for router in self.routers]
        self.url = self.urls[0]
        for url in self.urls:
            self.wait_ready(url)
            self.wait_model(url, "generate")


@pytest.fixture(scope="session")
def mesh() -> Iterator[TalkingMesh]:
    """A running mesh; tests that kill a process start it again."""
    made = TalkingMesh()
    yield made
    made.close()


class Done(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


class Command:
    """The command, told one mesh's address; run in this process, for its start takes longer than it does."""

    def __init__(
        self, url: str, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
    ) -> None:
        self.url, self._capture, self._patch = url, capture, patch

    def words(self, *words: str) -> list[str]:
        return [*words, "--url", self.url]

    def run(self, *words: str, piped: str = "") -> Done:
        self._capture.readouterr()
        self._patch.setattr(sys, "stdin", io.StringIO(piped))
        return Done(main(self.words(*words)), *self._capture.readouterr())


@pytest.fixture
def command(
    mesh: TalkingMesh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """The command, at the first router."""
    monkeypatch.setenv("TERM", "dumb")
    return Command(mesh.url, capsys, monkeypatch)
