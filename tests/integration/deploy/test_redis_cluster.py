"""The scripts of the scale-out overlay's Redis Cluster, on six real servers, each at an address of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from common.redis import durability
from tests.support.servers import MISSING, free_port

PARTS = Path(__file__).parents[3] / "k8s" / "components" / "redis-cluster"
MOUNTED = "/usr/local/etc/redis"  # where the manifests mount the files
PASSWORD = "a-password"
NODES = 6
WAIT_S = 60.0


class Nodes:
    """Six nodes on one port of six loopback addresses; a restart gives each another address, as pods get them."""

    def __init__(self, root: Path) -> None:
        self.root, self.port, self.generation = root, free_port(), 0
        self.processes: list[subprocess.Popen[bytes]] = []
        for number in range(NODES):
            home = root / str(number)
            (home / "data").mkdir(parents=True)
            for name in ("redis.conf", "start.sh", "rejoin.sh", "form.sh"):
                text = (PARTS / name).read_text().replace(MOUNTED, str(home))
                (home / name).write_text(text.replace("/data", str(home / "data")))

    def address(self, number: int) -> str:
        return f"127.7.{self.generation}.{number + 1}"

    @property
    def environment(self) -> dict[str, str]:
        peers = " ".join(self.address(number) for number in range(NODES))
        return {**os.environ, "REDISCLI_AUTH": PASSWORD, "PEERS": peers, "PORT": str(self.port)}

    def start(self) -> None:
        """Start every node at its address, and its postStart hook beside it."""
        self.generation += 1
        for number in range(NODES):
            home, address = self.root / str(number), self.address(number)
            announced = ["--cluster-announce-ip", address, "--cluster-announce-hostname", address]
            command = ["sh", str(home / "start.sh"), "--port", str(self.port), "--bind", address]
            for words, env in (
                ([*command, *announced, "--logfile", str(home / "log")], {}),
                (["sh", str(home / "rejoin.sh")], {"HOST": address}),
            ):
                self.processes.append(subprocess.Popen(words, env={**self.environment, **env}))

    def form(self) -> str:
        """Run the Job's script; return what it printed."""
        script = ["sh", str(self.root / "0" / "form.sh")]
        done = subprocess.run(
            script, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kill(self) -> None:
        """End every process at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(60)
        self.processes.clear()

    def whole(self, number: int) -> bool:
        """Return whether a node serves, and is linked to all others (its state alone says ok too early)."""
        try:
            with redis.Redis(host=self.address(number), port=self.port, password=PASSWORD) as one:
                state = one.cluster("INFO")["cluster_state"]
                links = [node["connected"] for node in one.cluster("NODES").values()]
        except redis.ConnectionError:
            return False
        return state == "ok" and links == [True] * NODES

    def wait_whole(self) -> None:
        """Wait until every node serves and is linked to all others."""
        give_up = time.monotonic() + WAIT_S
        while not all(self.whole(number) for number in range(NODES)):
            assert time.monotonic() < give_up, "the nodes are no whole cluster"
            time.sleep(0.1)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Nodes that run and know nobody."""
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        pytest.skip(MISSING["redis7"])
    made = Nodes(tmp_path)
    made.start()
    yield made
    made.kill()


async def test_a_cluster_forms_and_survives_new_addresses(nodes: Nodes, tmp_path: Path) -> None:
    """The Job makes one cluster with replicas; when all nodes have come back elsewhere, it is whole again."""
    nodes.form()
    nodes.wait_whole()

    async def open_bus() -> Bus:
        url = f"redis://:{PASSWORD}@{nodes.address(0)}:{nodes.port}"
        config = Common(
            data_dir=str(tmp_path), redis_url=url, redis_cluster=True, durability="replicated"
        )
        return await Bus.open(config, SystemClock())

    bus = await open_bus()
    for call in bus.connection.callers():
        await durability.check(call, "replicated")
    assert len(bus.connection.callers()) == NODES // 2
    await bus.connection.call("SET", "{f}:kept", "yes")
    await bus.close()
    nodes.kill()
    nodes.start()
    nodes.wait_whole()
    bus = await open_bus()

    assert await bus.connection.call("GET", "{f}:kept", timeout_s=30) == b"yes"
    assert "belongs to a cluster" in nodes.form()
    await bus.close()
