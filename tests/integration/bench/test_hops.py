"""The hop table is measured on the services' own code, and every hop is in it."""

from __future__ import annotations

from pathlib import Path

from bench import hops


async def test_every_hop_is_timed(tmp_path: Path) -> None:
    """A request's whole path is walked, and each hop has as many samples as there were requests."""
    times = await hops.measure(3, tmp_path)

    assert set(times) == set(hops.HOPS)
    assert {len(values) for values in times.values()} == {3}
    assert len(hops.rows(times)) == len(hops.HOPS) + 1
