"""A real mesh with two routers and a chat model on the sim device, for the SDK and the commands that use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
