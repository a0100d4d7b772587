"""`spillway up`, `status` and `down`: the supervisor, with services that do nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from common.placement import DEMONSTRATION
from tests.integration.cli.conftest import Spillway
from tests.support.servers import Server


def test_detach_returns_ready_and_down_leaves_nothing(stubbed: Spillway) -> None:
    """`up --detach` returns when all is ready, `down` ends every process and what it noted."""
    url = stubbed.up()

    status = stubbed.status()
    assert status["ready"] is True
    assert status["url"] == url
    names = {
        "redis",
        "redis-pages",
        "router",
        "gpu_worker",
        "cpu_worker",
        "vector_search",
        "kv_store",
    }
    assert set(stubbed.pids()) == {f"{name}-0" for name in names}

    assert stubbed.run("down").returncode == 0
    assert stubbed.processes() == []
    assert stubbed.run("status").returncode == 3


def test_one_kind_of_device_makes_one_lane(stubbed: Spillway) -> None:
    """Where nothing can overflow no overflow worker starts; one that is asked for does, and what it is for is said."""
    stubbed.env |= {"SPILLWAY_DEVICE": "cpu", "SPILLWAY_OVERFLOW_WORKERS": "auto"}
    stubbed.up()
    assert "cpu_worker-0" not in stubbed.pids()
    assert stubbed.run("down").returncode == 0

    said = stubbed.run("up", "--detach", "--port", "0", SPILLWAY_OVERFLOW_WORKERS="2").stdout

    assert {"cpu_worker-0", "cpu_worker-1"} < set(stubbed.pids())
    assert said.count(DEMONSTRATION) == 1


def test_a_data_directory_has_one_instance(stubbed: Spillway) -> None:
    """A second `up` on the same directory is refused with a sentence, and the first runs on."""
    stubbed.up()

    second = stubbed.run("up", "--port", "0")

    assert second.returncode == 2
    assert "is in use by process" in second.stderr
    assert stubbed.status()["ready"] is True


def test_two_instances_side_by_side(stubbed: Spillway, tmp_path: Path) -> None:
    """Instances with their own ports and directories do not see each other, and `ps` tells them apart."""
    other = tmp_path / "other"
    one, two = stubbed.up(), stubbed.up(data_dir=other)

    assert one != two
    assert len(stubbed.processes()) == len(stubbed.processes(other)) == 8
    stubbed.run("down")
    assert stubbed.status(other)["ready"] is True
    assert stubbed.run("down", data_dir=other).returncode == 0


def test_every_killed_process_comes_back(stubbed: Spillway) -> None:
    """kill -9 of any process, Redis too, is answered by a new one that becomes ready."""
    stubbed.up()
    before = stubbed.pids()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)

    stubbed.until(
        lambda: (
            stubbed.status()["ready"] and not set(before.values()) & set(stubbed.pids().values())
        )
    )

    assert set(stubbed.pids()) == set(before)


def test_a_killed_supervisor_leaves_no_trouble(stubbed: Spillway) -> None:
    """After kill -9 of the supervisor its children end too, and a new `up` finds what was stored."""
    stubbed.up()
    key = stubbed.run("keys", "create", "--tenant", "acme").stdout.split("-")[2]
    os.kill(stubbed.status()["pid"], signal.SIGKILL)

    stubbed.until(lambda: stubbed.processes() == [])
    stubbed.up()

    assert key in stubbed.run("keys", "list").stdout


def test_a_leftover_is_ended(stubbed: Spillway) -> None:
    """A process that a dead supervisor left behind is ended by the next `up`, and by `down`."""
    for word in ("up", "down"):
        words = [sys.executable, "-m", "services.router", "--data-dir", str(stubbed.data_dir)]
        left = subprocess.Popen(words, cwd=stubbed.cwd, env=stubbed.env, stderr=subprocess.DEVNULL)
        stubbed.until((stubbed.data_dir / "run" / "router-0.json").exists)

        if word == "up":
            stubbed.up()
        else:
            assert "ended 1 processes" in stubbed.run("down").stdout

        assert left.wait(60) == 0
        stubbed.run("down")


def test_a_crash_loop_is_reported(stubbed: Spillway) -> None:
    """A service that cannot start ends the start with status 1, its name and its last lines."""
    done = stubbed.run("up", "--port", "0", STUB_gpu_worker="crash")

    assert done.returncode == 1
    assert "gpu_worker ended with status 1 again and again" in done.stdout
    assert "the stub was told to crash" in done.stdout
    assert stubbed.processes() == []


def test_a_services_config_error_is_ours(stubbed: Spillway) -> None:
    """A service that refuses its config ends the start at once, with its sentence and status 2, detached or not."""
    for words in (("up",), ("up", "--detach")):
        done = stubbed.run(*words, "--port", "0", STUB_gpu_worker="config")

        assert done.returncode == 2
        assert done.stderr == "spillway: SPILLWAY_EMBED_MODEL is 'x': expected a model\n"


def test_interrupt_drains_in_order(stubbed: Spillway) -> None:
    """Ctrl-C stops the router before the workers and Redis last, and the command ends with status 0."""
    process = stubbed.start("up", "--port", "0")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "v1/embeddings" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    process.stdout.close()

    stopped = [line.split()[2] for line in lines if line.strip().endswith("stopping")]
    assert stopped[0] == "router"
    assert set(stopped[-2:]) == {"redis", "redis-pages"}
    assert len(stopped) == 7


def test_second_interrupt_ends_at_once(stubbed: Spillway) -> None:
    """A service that takes its time to drain does not survive the second Ctrl-C."""
    process = stubbed.start("up", "--port", "0", STUB_router="stubborn", SPILLWAY_DRAIN_S="50")
    assert process.stdout is not None
    for line in process.stdout:
        if "v1/embeddings" in line or line.strip().endswith("router           stopping"):
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    process.stdout.close()
    assert stubbed.processes() == []


def test_a_long_path_is_no_problem(stubbed: Spillway, tmp_path: Path) -> None:
    """A data directory deeper than a Unix socket's path may be works, and so do commands on the bus."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    url = stubbed.up(data_dir=deep)

    assert url.startswith("http://127.0.0.1:")
    assert stubbed.run("keys", "list", data_dir=deep).returncode == 0
    assert stubbed.run("down", data_dir=deep).returncode == 0


def test_metrics_and_probes_of_a_service(stubbed: Spillway) -> None:
    """Every service serves its probes and metrics on a port that `run/` names."""
    stubbed.up()
    for note in sorted((stubbed.data_dir / "run").glob("*worker-0.json")):
        port = json.loads(note.read_text())["health_port"]
        for path in ("livez", "readyz", "startupz", "health", "metrics"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
                assert answer.status == 200


def test_a_server_of_ones_own(stubbed: Spillway, redis_server: Server) -> None:
    """With SPILLWAY_REDIS_URL no server is started, and one that would lose work is refused with a sentence."""
    stubbed.env["SPILLWAY_REDIS_URL"] = redis_server.url
    stubbed.up()
    assert {name for name in stubbed.pids() if "redis" in name} == {"redis-pages-0"}
    stubbed.run("down")
    stubbed.env["SPILLWAY_PAGES_URL"] = "none"
    stubbed.up()
    assert not any("redis" in name for name in stubbed.pids())
    stubbed.run("down")

    redis_server.config_set("maxmemory-policy", "allkeys-lru")
    refused = stubbed.run("up", "--port", "0")
    assert refused.returncode == 2
    assert "maxmemory-policy is allkeys-lru" in refused.stderr

    redis_server.stop()
    away = stubbed.run("up", "--port", "0", SPILLWAY_START_TIMEOUT_S="1")
    assert away.returncode == 1
    assert redis_server.url.removeprefix("redis://") in away.stdout


def test_a_broken_store_says_why(stubbed: Spillway) -> None:
    """A server that cannot read its own files again is named with what it said."""
    stubbed.up()
    stubbed.run("keys", "create", "--tenant", "a")
    stubbed.run("down")
    for path in (stubbed.data_dir / "redis" / "appendonlydir").glob("*.incr.aof"):
        path.write_bytes(b"*3\r\n$3\r\nSET\r\nnonsense in the middle" + b"\r\n" * 100)

    broken = stubbed.run("up", "--port", "0")

    assert broken.returncode == 1
    assert "redis ended with status 1 again and again" in broken.stdout
    assert "Bad file format" in broken.stdout
