"""A full disk, on a mesh of its own: writes wait with 503, reads and embeddings go on, and space heals everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hostile.clear import clear
from tests.support.hostile.wire import Reply
from tests.support.hostile.world import Witness, World
from tests.support.servers import Server
from tests.support.waiting import until_sync

ROOT = Path(__file__).resolve().parents[3]
NOT_NOW = {"disk_full", "bus_down", "bus_full", "not_applied", "behind"}
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small file system")


class Disk:
    """A small file system that can be filled and emptied."""

    def __init__(self, megabytes: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="sw-disk-"))
        words = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={megabytes}m,mode=700",
            "none",
            str(self.path),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs to mount a small file system: {done.stderr.strip()}")

    def fill(self) -> None:
        with (self.path / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 65536)
            except OSError:
                return

    def empty(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False)
        self.path.rmdir()


@pytest.fixture(scope="module")
def disks() -> Iterator[tuple[Disk, Disk]]:
    """The services' disk and Redis'."""
    made = Disk(64), Disk(32)
    yield made
    for disk in made:
        disk.close()


@pytest.fixture(scope="module")
def mesh(disks: tuple[Disk, Disk]) -> Iterator[World]:
    """A mesh whose files lie on small disks."""
    made = World(directory=disks[0].path, redis=Server("valkey", dir=str(disks[1].path)))
    yield made
    made.close()


def _until_served(ask: Callable[[], Reply]) -> None:
    """Ask until the status is 200; every answer on the way is a clear one."""

    def served() -> bool:
        reply = ask()
        clear(reply)
        return reply.status == 200

    until_sync(served, "the mesh serves again")


def _store(mesh: World, name: str, text: str = "a weir") -> Reply:
    return mesh.ask(
        "POST", "/v1/collections/facts/documents", {"documents": [{"id": name, "text": text}]},
        tenant="witness", headers={"Spillway-Timeout": "2"},
    )  # fmt: skip


def test_full_disk_of_the_services(mesh: World, disks: tuple[Disk, Disk]) -> None:
    """The log of writes cannot grow: storing gets 503 (or 504 in the end), searching and embedding go on as before."""
    watch = Witness(mesh)
    disks[0].fill()
    try:
        for number in range(2):
            reply = _store(mesh, f"refused-{number}")
            assert reply.status in {503, 504}, reply
            assert reply.json["error"]["code"] in {*NOT_NOW, "deadline_exceeded"}
        env = {k: v for k, v in os.environ.items() if not k.startswith("SPILLWAY_")}
        env |= {
            "SPILLWAY_URL": f"http://127.0.0.1:{mesh.port}",
            "SPILLWAY_API_KEY": mesh.keys["witness"],
        }
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", "ingest", "facts", str(ROOT / "pyproject.toml"), "--patience", "1"],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done
        assert "Traceback" not in done.stderr
        assert done.stderr.rstrip().rpartition("\n")[2].startswith(("spillway: ", "failed: "))
        watch.undisturbed()
    finally:
        disks[0].empty()
    _until_served(lambda: _store(mesh, "after"))
    found = mesh.ask("GET", "/v1/collections/facts/documents/after", tenant="witness")
    assert found.json["text"] == "a weir"
    watch.undisturbed()
    watch.close()
    assert mesh.alive()


def test_full_disk_of_redis(mesh: World, disks: tuple[Disk, Disk]) -> None:
    """Redis cannot append: it refuses writes, clients get 503 with Retry-After, nobody dies, and space heals it."""
    assert mesh.ask("POST", "/v1/embeddings", {"input": "before"}).status == 200
    disks[1].fill()
    big = "x" * 200_000

    def ask() -> Reply:
        return mesh.ask(
            "POST",
            "/v1/embeddings",
            {"input": big, "truncate": True},
            headers={"Spillway-Timeout": "2"},
        )

    try:
        reply = ask()
        give_up = time.monotonic() + 30
        while reply.status == 200 and time.monotonic() < give_up:
            reply = ask()
        assert reply.status in {503, 504}, reply
        assert b"/" not in reply.body.replace(b"application/json", b""), reply
        clear(reply) if reply.status == 503 else json.loads(reply.body)
        assert mesh.ask("GET", "/livez").status == 200
    finally:
        disks[1].empty()
    _until_served(lambda: mesh.ask("POST", "/v1/embeddings", {"input": "after"}))
    assert mesh.alive()
