"""What Redis gives up under a host that drops by value: least recent is not behind what prices and rates choose."""

from __future__ import annotations

from bench.simulation.kv_below import POLICIES, Below
from bench.simulation.kv_simulation import TierSetting, TierSimulation

SMALL = TierSetting(rate=4.0, device_pages=800, host_pages=200, conversations=120)


def test_least_recent_is_good_enough_below() -> None:
    """All policies meet the same load and hold more than two tiers alone; LRU makes the least be computed again."""
    found = {name: Below(name, SMALL, 200, 1).run() for name in POLICIES}
    alone = TierSimulation("spillway", SMALL, 1).run()

    assert {one.past for one in found.values()} == {alone.past}
    assert min(one.hits for one in found.values()) > alone.hits
    assert found["lru"].recompute_s <= 1.01 * min(one.recompute_s for one in found.values())


def test_a_roomy_redis_loses_nothing() -> None:
    """With room for everything no policy makes anything be computed again."""
    for name in ("lru", "spillway"):
        assert Below(name, SMALL, 1 << 20, 3).run().recomputed_tokens == 0
