"""The machine's speed between blocks: stolen CPU time is read and judged."""

from __future__ import annotations

from pathlib import Path

from bench.peak import STOLEN, CpuTicks, Peak, Speed, read_ticks, still_blocks, stolen_share


def test_ticks_are_those_of_all_cores(tmp_path: Path) -> None:
    """The first line's first eight numbers are summed, guests' being in the first two; the eighth was stolen."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 800 5 0 10 35 7 7\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 5\n")

    assert read_ticks(stat) == CpuTicks(1000, 35)
    assert read_ticks(tmp_path / "none") == CpuTicks()


def test_share_of_stolen_time() -> None:
    """It is of the time between two readings; a tick or two are noise, and no time has passed where none is told."""
    assert stolen_share(CpuTicks(1000, 10), CpuTicks(1400, 20)) == 10 / 400
    assert stolen_share(CpuTicks(1000, 10), CpuTicks(1020, 12)) == 0.0
    assert stolen_share(CpuTicks(), CpuTicks()) == 0.0


def test_block_with_stolen_time_does_not_count() -> None:
    """What was stolen before the first block is nobody's; a share at the limit is let pass."""
    speeds = [Speed(1, 1, 0.5), Speed(1, 1, STOLEN), Speed(1, 1, 2 * STOLEN), Speed(1, 1)]

    assert still_blocks(speeds) == [True, False, True]


def test_speed_of_this_machine() -> None:
    """All three are measured."""
    found = Peak(size=32, repeats=1, mebibytes=1).now()

    assert found.gflops > 0
    assert found.gbs > 0
    assert 0 <= found.stolen <= 1
