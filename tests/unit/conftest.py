"""The unit tier: asyncio runs on a virtual clock, and a test that starts a process or opens a connection fails."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing.process
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.simulation.virtual_loop import VirtualLoop
from common.native.finder import find
from engine.kernels.sources import CHECKSUMS, DECODER, ENCODER, MEMORY
from services.vector_search.index.native.sources import (
    SCAN_LISTS,
    SCAN_LISTS_AVX2,
    SELECTION,
    TRAVERSE,
    TRAVERSE_AVX2,
)

# Audit events of the interpreter, by which a process is started or another one is spoken to.
OUTSIDE = frozenset({
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system",
    "socket.bind", "socket.connect", "subprocess.Popen",
})  # fmt: skip
# The slowest to build comes first; the tier's other processes begin at the end.
NATIVE = (
    DECODER, [TRAVERSE], [TRAVERSE_AVX2], [SCAN_LISTS], [SCAN_LISTS_AVX2], [SELECTION], [ENCODER], MEMORY, CHECKSUMS,
)  # fmt: skip
_running = ""  # the test under way; audit hooks cannot be removed


class OutsideError(BaseException):
    """A unit test left its process. No handler of errors may hide that."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _running and event in OUTSIDE:
        raise OutsideError(
            f"{_running} calls {event}{arguments[:2]!r}: its place is tests/integration"
        )


sys.addaudithook(_audit)


def _no_process(process: multiprocessing.process.BaseProcess) -> None:
    raise OutsideError(f"{_running} starts {process}: its place is tests/integration")


class VirtualPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes virtual loops, for tests that call asyncio.run."""

    _loop_factory = VirtualLoop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the tests that are coroutines on virtual loops."""
    return {"virtual": VirtualLoop}


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """Build kernels and the list of fonts where no earlier run has: no unit test calls the compiler or `fc-list`."""
    importlib.import_module("matplotlib.font_manager")
    for builds in NATIVE if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0" else NATIVE[::-1]:
        next(filter(None, map(find, builds)), None)


@pytest.fixture(autouse=True)
def _inside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watch the test, and give it virtual loops."""
    global _running  # noqa: PLW0603
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(VirtualPolicy())
    # A process of multiprocessing is started below the events that are audited.
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", _no_process)
    _running = request.node.nodeid
    yield
    _running = ""
    asyncio.set_event_loop_policy(before)
