"""The mesh: what is killed comes back, nothing outlives it, failures are told with their log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis.asyncio

from bench.mesh import proc, processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.probe import MeshError
from bench.mesh.processes import Service


async def test_killed_process_is_started_again(tmp_path: Path) -> None:
    """A supervised process that is killed is another one afterwards, and ready."""
    async with LocalMesh(tmp_path, [], supervise=True) as mesh:
        before = mesh.pid("redis")
        mesh.kill("redis")
        await mesh.replaced("redis", before, 10)
        after = mesh.pid("redis")

        assert before != after
        assert proc.rss_bytes(after) > 0
        assert [name for _, name in mesh.restarts] == ["redis"]
    assert proc.rss_bytes(after) == 0


async def test_restart_by_name(tmp_path: Path) -> None:
    """Without supervision a restart is ours, and the seconds it took are returned."""
    async with LocalMesh(tmp_path, []) as mesh:
        before = mesh.pid("redis")
        seconds = await mesh.restart("redis", 10)

        assert 0 < seconds < 10
        assert before != mesh.pid("redis")


async def test_pages_have_a_redis_of_their_own(tmp_path: Path) -> None:
    """It is there if a service keeps pages, is killed like any process, and empty afterwards."""
    async with LocalMesh(tmp_path, [processes.kv_store()]) as mesh:
        pages = redis.asyncio.from_url(mesh.pages_url)
        await pages.set("page", b"1")
        await mesh.restart("redis-pages", 10)

        assert mesh.names() == ["redis", "redis-pages", "kv_store"]
        assert not await pages.exists("page")
        await pages.aclose()


async def test_failed_start_shows_the_log(tmp_path: Path) -> None:
    """A service that ends at once is named, with the end of its log, and nothing is left running."""
    mesh = LocalMesh(tmp_path, [Service("broken", "services.no_such_service")])
    before = _servers()

    with pytest.raises(MeshError, match="no_such_service"):
        async with mesh:
            pass
    assert _servers() <= before


async def test_unknown_name_is_refused(tmp_path: Path) -> None:
    """Asking for a process that is not in the mesh names those that are."""
    async with LocalMesh(tmp_path, []) as mesh:
        with pytest.raises(MeshError, match="there are \\['redis'\\]"):
            mesh.kill("router")


def _servers() -> set[int]:
    return {pid for pid in proc.children(os.getpid()) if _is_server(pid)}


def _is_server(pid: int) -> bool:
    try:
        return "valkey" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
