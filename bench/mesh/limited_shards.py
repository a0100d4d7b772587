"""Four vector_search processes, a shard each, in memory cgroups that count the page cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from spillway_client import AsyncSpillway, ShardExplanation, SpillwayError

from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.memory_groups import GroupUse, MemoryGroups, MemoryGroupsError
from bench.mesh.probe import MeshError
from bench.mesh.search_mesh import COLLECTION, SpillwayServer
from bench.workloads.http_link import HttpError, HttpLinks

SHARDS = [f"vector_search-{number}" for number in range(4)]
# What ends a measurement within limits; `reason` says it in a line.
FAILURES = (MeshError, SpillwayError, HttpError, OSError, TimeoutError)


class GroupsFound(Protocol):
    """What was measured within limits: bytes at most, how many were killed, and what went wrong."""

    peak: int
    kills: int
    why: str


def why_not(parent: Path | None) -> str:
    """Return why no memory group can be made below a directory; empty if one can."""
    if parent is None:
        return "no cgroup was named: `--cgroup DIR` is the directory of v1's memory hierarchy, or one of v2"
    try:
        with MemoryGroups(parent, dict.fromkeys(SHARDS, 1 << 30)):
            return ""
    except MemoryGroupsError as error:
        return str(error)


@asynccontextmanager
async def limited_mesh(
    folder: Path, env: Mapping[str, str], groups: MemoryGroups | None
) -> AsyncIterator[SpillwayServer]:
    """Start a router, an encoder that nobody asks, and the processes of the shards with these variables."""
    shards = [replace(processes.vector_search(name), env=env) for name in SHARDS]
    services = [processes.router(), processes.sim_worker(), *shards]
    async with LocalMesh(folder, services, groups=groups) as mesh, HttpLinks(mesh.url) as links:
        yield SpillwayServer(mesh, links)


async def indexed(
    mesh: LocalMesh, built: Callable[[ShardExplanation], bool], timeout_s: float
) -> list[ShardExplanation]:
    """Wait until every shard is built; return how they stand. MeshError once a process has ended, TimeoutError late."""
    async with (
        asyncio.timeout(timeout_s),
        AsyncSpillway(mesh.url, timeout_s=60, max_retries=0) as client,
    ):
        while True:
            for name in SHARDS:
                mesh.check_alive(name)
            try:
                told = (await client.collections.explain(COLLECTION)).shards
            except SpillwayError:  # a shard is being opened
                told = []
            if len(told) == len(SHARDS) and all(built(each) for each in told):
                return told
            await asyncio.sleep(0.5)


def reason(error: BaseException) -> str:
    """Return what ended a measurement, in at most 200 characters of a line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def used(found: GroupsFound, groups: Mapping[str, GroupUse]) -> None:
    """Note what the kernel counted; a kill is the reason for what else went wrong."""
    found.peak = sum(each.peak for each in groups.values())
    found.kills = sum(each.kills for each in groups.values())
    if found.kills:
        found.why = "killed: out of memory"
