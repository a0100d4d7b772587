"""V1M and the time budgets of V1W through real meshes: four shards that are filled and searched, and what was used."""

from __future__ import annotations

from pathlib import Path

from bench.document import BenchOptions
from bench.mesh.search_mesh import search_mesh
from bench.suites import v1m, v1w
from bench.workloads.search_sets import SetShape, search_set


async def test_four_shards_are_filled_and_found(tmp_path: Path) -> None:
    """Without limits each process holds a shard with a graph, and all together answer every search well."""
    options = BenchOptions(quick=True, count=1, setup_dir=tmp_path)
    rows = search_set(SetShape("clustered", 6000, 32, "clustered"), 1, tmp_path)

    found = await v1m._is_filled(rows, 0.0, options)

    assert (found.why, found.failed, found.kills, found.limit) == ("", 0, 0, 0)
    assert found.recall >= v1m.RECALL
    assert found.latencies_s
    assert found.own > 0


async def test_searches_with_a_budget_say_what_they_used(tmp_path: Path) -> None:
    """Much time fits and little does not; each search is reported in milliseconds, by the shard and by the client."""
    options = BenchOptions(quick=True, setup_dir=tmp_path)
    rows = search_set(SetShape("clustered", 12_000, 8, "clustered"), 1, tmp_path)

    async with search_mesh(rows, options) as server:
        much = await v1w._within(server, rows, 600_000.0, 1.0)
        none = await v1w._within(server, rows, 0.001, 1.0)

    assert (much.failed, none.failed, len(much.fits)) == (0, 0, v1w.BUDGET_RATE)
    assert all(much.fits)
    assert not any(none.fits)
    assert much.recall > none.recall or much.recall == 1.0
    assert max(none.efforts) < min(much.efforts)
    assert all(took < client for took, client in zip(much.took_ms, much.client_ms, strict=True))
