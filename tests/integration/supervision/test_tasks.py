"""A background task of any service that ends by itself ends its process with status 1, and says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mesh import ROOT, Process
from tests.support.servers import Server

SIM = ("--device", "sim", "--threads", "1", "--drain-s", "1")
FLAGS = {
    "router": ("--port", "0", "--drain-s", "1"),
    "kv_store": ("--drain-s", "1"),
    "cpu_worker": SIM,
    "gpu_worker": (*SIM, "--embed-model", "none", "--chat-model", "sim"),
    "vector_search": ("--drain-s", "1"),
}
WORKER = [
    *(f"common.worker.worker:Worker.{name}" for name in ("_turns", "_beats")),
    *(
        f"common.worker.lane_recovery:LaneRecovery.{name}"
        for name in ("_recovers", "_reconciles", "_reaps")
    ),
]
TASKS = {
    "router": [
        "common.worker.serve_each:JobServer._read",
        "common.worker.serve_each:JobServer._step",
        "services.router.mesh.monitor:MeshMonitor._run",
        "services.router.mesh.history:MeshHistory._note_metrics",
        "services.router.mesh.history:MeshHistory._note_batches",
        "common.health:Health.beat",
        *WORKER,
    ],
    "kv_store": [
        "common.worker.serve_each:JobServer._read",
        "common.worker.serve_each:JobServer._step",
        "services.kv_store.deletion.sweep:Sweep.run",
        "services.kv_store.pages.page_keeper:PageKeeper.run",
        "services.kv_store.pages.session_pins:SessionPins.run",
        "services.kv_store.service:watch_bus",
    ],
    "cpu_worker": [
        "services.adapters.encode.loop:EmbeddingLoop._read",
        "services.adapters.encode.loop:EmbeddingLoop._work",
        "services.adapters.encode.loop:EmbeddingLoop._read_own",
        "services.adapters.encode.questions:QuestionLoop.run",
        "services.adapters.worker:watch_bus",
    ],
    "gpu_worker": [
        "services.adapters.generate.loop:GenerationLoop._reads",
        "services.adapters.generate.loop:GenerationLoop._computes",
        "services.adapters.generate.output_emitter:OutputEmitter.run",
        "engine.decoder.kv.offload:OffloadManager.run",
        "services.adapters.generate.cache_announcer:CacheAnnouncer.run",
        "services.adapters.generate.cache_invalidation:CacheInvalidation.run",
    ],
    "vector_search": [
        "services.vector_search.replica:Replica._follow",
        "services.vector_search.applier:Applier.run",
        "services.vector_search.applier:Applier.listen",
        "services.vector_search.maintenance:ShardMaintenance.run",
        "services.vector_search.maintenance:ShardMaintenance.take_snapshots",
        "services.vector_search.service:watch_bus",
    ],
}
CASES = [(service, target) for service, targets in TASKS.items() for target in targets]


class Sabotaged(Process):
    """A service of which one task ends when told to."""

    def __init__(self, service: str, target: str, directory: Path, url: str) -> None:
        super().__init__(service, directory, url, "0", *FLAGS[service])
        self.trigger = directory / "now"
        self._env["SPILLWAY_PAGES_URL"] = url
        flags = self._command[3:]
        self._command = [sys.executable, "-m", "tests.integration.supervision.sabotage", target]
        self._command += [str(self.trigger), service, *flags]
        self._env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "client")])


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    """One server for all, since each service has a directory of its own."""
    server = Server("valkey").start()
    yield server
    server.close()


def ended(made: Sabotaged) -> int:
    """Return the exit status of a process that must end by itself."""
    assert made.process is not None
    try:
        return made.process.wait(timeout=100)
    except subprocess.TimeoutExpired:
        made.kill(signal.SIGKILL)
        raise AssertionError(f"it went on:\n{made.log.read_text()[-3000:]}") from None


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("service", "target"), CASES, ids=[target for _, target in CASES])
def test_a_task_that_ends_ends_the_process(
    service: str, target: str, redis: Server, tmp_path: Path
) -> None:
    """The process says which task ended, drains, and exits with 1 for whoever starts it anew."""
    redis.flush()
    made = Sabotaged(service, target, tmp_path, redis.url)
    made.start()
    try:
        made.ports()
        made.trigger.touch()

        assert ended(made) == 1
    finally:
        if made.process is not None and made.process.poll() is None:
            made.kill(signal.SIGKILL)
    said = made.log.read_text()
    assert "service_failed" in said
    assert f"SabotageError: {target}" in said
