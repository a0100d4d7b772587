"""The hop table is measured on a real mesh; the hops of a request are its whole latency."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import hops
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from loadgen import bodies
from loadgen.load import LoadRun
from loadgen.target import Target


async def test_the_hops_of_a_request_are_its_whole_latency(tmp_path: Path) -> None:
    """Every hop of every request is stamped, none is negative, and together they are what the client measured."""
    files = {name: tmp_path / name for name in ("router.stamps", "worker.stamps")}
    router, worker = processes.router(), processes.sim_worker()
    services = [
        dataclasses.replace(router, stamps=str(files["router.stamps"])),
        dataclasses.replace(worker, stamps=str(files["worker.stamps"])),
    ]
    async with LocalMesh(tmp_path, services) as mesh, Target([mesh.url]) as target:
        load = LoadRun(target, bodies.embed(1, 16, seed=1))
        done = await load.closed(3, count=12)

    times = hops.measure(done, load.began, *files.values())

    assert list(times) == [hop.name for hop in hops.HOPS]
    assert {len(values) for values in times.values()} == {12}
    assert all(value >= 0 for values in times.values() for value in values)
    whole = [sample.done_s - sample.sent_s for sample in done.samples]
    assert hops.whole_s(times) == pytest.approx(whole)
    assert len(hops.rows(times, whole)) == len(hops.HOPS) + 3
