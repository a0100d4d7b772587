"""Fixtures of all tests: real servers, a bus, and the seeds and counts of property tests."""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.internal.conjecture.optimiser  # noqa: F401 - else compiled deep in some test's stack, where CPython 3.11 may fail
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import core as hypothesis_core

from tests.support.servers import Cluster, Server

if TYPE_CHECKING:
    from common.bus import Bus
    from common.config import Common

PROFILE = os.environ.get("SPILLWAY_PROFILE", "test")
SEED = int(os.environ.get("SPILLWAY_SEED") or random.SystemRandom().randint(1, 2**31))
os.environ["SPILLWAY_SEED"] = str(SEED)  # the same for every process of this run
# Kernels for CUDA run in Triton's interpreter, which must be known before anything of Triton is loaded.
os.environ["TRITON_INTERPRET"] = "1"
_COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "derandomize": False,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("test", max_examples=30, stateful_step_count=30, **_COMMON)
settings.register_profile("soak", max_examples=1000, stateful_step_count=60, **_COMMON)
settings.load_profile(PROFILE)

TIMEOUT_AGAIN_S = 60.0
TEARDOWN_S = 300.0
_skipped: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed of all property tests, so that a failing run can be repeated."""
    if config.getoption("hypothesis_seed", None) is None:
        hypothesis_core.global_force_seed = SEED  # type: ignore[assignment]


def pytest_report_header() -> str:
    """Print what is needed to repeat this run."""
    return f"spillway: SPILLWAY_PROFILE={PROFILE} SPILLWAY_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests marked `soak`, and the cases that the seed leaves out of those marked `sampled`, to `make soak`."""
    if PROFILE == "soak":
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {id(item) for test, found in cases.items() for item in _left_out(test, found)}
    items[:] = [
        item
        for item in items
        if item.get_closest_marker("soak") is None and id(item) not in left_out
    ]


def _left_out(test: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of a test that are not drawn; the draw depends on the seed and the test's name alone."""
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    (most,) = marker.args
    return random.Random(f"{SEED} {test}").sample(cases, max(0, len(cases) - most))


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, bool, bool]:
    """Let a test's timeout come again and again: raised in a loop's callback or a task nobody awaits, it is lost."""
    done = yield
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, left, TIMEOUT_AGAIN_S)
    return done


@pytest.hookimpl(trylast=True)
def pytest_exception_interact() -> None:
    """When a test fails all timeouts are cancelled, for debuggers; in the gate its teardown must end, too."""
    if os.environ.get("CI"):
        faulthandler.dump_traceback_later(TEARDOWN_S, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Let the limit of a failed test's teardown end with that test, or it ends the process in a later one."""
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember why tests were skipped."""
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped.append(f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In the gate (CI is set) a test that could have run and was skipped is a failure."""
    if not os.environ.get("CI") or not _skipped or exitstatus not in {0, 1}:
        return
    can_install = os.geteuid() == 0 and Path("/usr/bin/apt-get").exists()
    # The machine's, not ours to install; and gigabytes of packages of others, which a person asks for.
    cannot = ["no AVX512", "kubectl is too old", "no packages of clients", "no rival"]
    if not can_install:
        cannot += ["no server: redis-server", "is missing; `make setup-full`"]
    wrong = [line for line in _skipped if not any(reason in line for reason in cannot)]
    for line in wrong:
        print(f"skipped, but could have run: {line}")
    if wrong:
        session.exitstatus = 1


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Return what notes a figure in a report whose form takes it; others have no place for it."""
    if request.config.getini("junit_family") != "xunit1":
        return lambda _name, _value: None
    found: Callable[[str, object], None] = request.getfixturevalue("record_property")
    return found


@pytest.fixture(autouse=True)
def _logs_end_with_their_test() -> Iterator[None]:
    """Take away the log that a service has set up in this process: pytest closes the stream it writes to."""
    yield
    root = logging.getLogger()
    root.handlers = [one for one in root.handlers if type(one) is not logging.StreamHandler]


@pytest.fixture(scope="session")
def seed() -> int:
    """This run's seed, for tests that draw their own random numbers."""
    return SEED


def _kind(request: pytest.FixtureRequest) -> str:
    if hasattr(request, "param"):
        return str(request.param)
    marker = request.node.get_closest_marker("server") if hasattr(request, "node") else None
    return str(marker.args[0]) if marker else "valkey"


@pytest.fixture
def redis_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of this test's own: Valkey 9.1, or by parameter or @pytest.mark.server("redis6")."""
    server = Server(_kind(request))
    server.start()
    yield server
    server.close()


@pytest.fixture
def redis_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A 3-node cluster of this test's own; building it takes some seconds."""
    made = Cluster.build(_kind(request))
    yield made
    made.close()


@pytest.fixture(scope="session")
def _shared_servers() -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = {}
    yield made
    for server in made.values():
        server.close()


@pytest.fixture
def shared_redis(request: pytest.FixtureRequest, _shared_servers: dict[str, Any]) -> Server:
    """An empty server that tests share (do not stop it): quicker than one of one's own."""
    kind = _kind(request)
    if kind not in _shared_servers:
        _shared_servers[kind] = Server(kind).start()
    server: Server = _shared_servers[kind]
    server.flush()
    return server


@pytest.fixture
def shared_cluster(request: pytest.FixtureRequest, _shared_servers: dict[str, Any]) -> Cluster:
    """An empty 3-node cluster that tests share (do not stop its nodes)."""
    name = f"cluster-{_kind(request)}"
    if name not in _shared_servers:
        _shared_servers[name] = Cluster.build(_kind(request))
    cluster: Cluster = _shared_servers[name]
    cluster.flush()
    return cluster


@pytest.fixture
def config(redis_server: Server, tmp_path: Path) -> Common:
    """A Common config for `redis_server`, with this test's directory as data directory."""
    from common.config import Common

    return Common(data_dir=str(tmp_path), redis_url=redis_server.url, log_format="json")


@pytest.fixture
async def bus(config: Common) -> AsyncIterator[Bus]:
    """An open bus on `redis_server`."""
    from common.bus import Bus
    from common.clock import SystemClock

    opened = await Bus.open(config, SystemClock())
    yield opened
    await opened.close()
