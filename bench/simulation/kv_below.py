"""Simulate a third tier below the two of `kv_simulation`: compare policies for what Redis drops.

Device and host drop by `spillway`; what the host drops, Redis keeps.
`python -m bench.simulation.kv_below` prints the table of docs/decisions.md, 60.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.simulation.kv_simulation import DROPS, Tiers, TierSetting, TierSimulation, _remove
from common.pages.identity import PageId
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import make_policy

POLICIES = ("lru", "pensieve", "spillway")
SETTINGS = ((4.0, 1000, 1000), (4.0, 2000, 3000), (6.0, 1000, 4000))  # rate, host, redis (pages)


class ThreeTiers(Tiers):
    """Device, host and Redis; Redis learns only from what is put there and read there."""

    def __init__(self, name: str, setting: TierSetting, redis_pages: int) -> None:
        super().__init__("spillway", setting)
        self._room = redis_pages
        self._seen = History()
        self._redis = make_policy(name, self._seen, setting.price)
        self._in_redis: set[PageId] = set()

    def take(self, pages: list[PageId]) -> list[int]:
        """See Tiers; what Redis has is not lost, and a turn that reads there names its chain."""
        lost = super().take(pages)
        read = [place for place in lost if pages[place] in self._in_redis]
        if read:
            self._seen.begin(pages[: read[-1] + 1], self.history.now_s)
        return [place for place in lost if pages[place] not in self._in_redis]

    def _drop(self, now_s: float) -> None:
        for page in self.host.victims(DROPS, now_s):
            _remove(page, self.on_host, self.host)
            if page not in self._in_redis:
                self._make_room(now_s)
                self._in_redis.add(page)
                self._redis.add(page)

    def _make_room(self, now_s: float) -> None:
        if len(self._in_redis) >= self._room:
            for page in self._redis.victims(DROPS, now_s):
                _remove(page, self._in_redis, self._redis)


class Below(TierSimulation):
    """The simulation's conversations over three tiers."""

    def __init__(self, name: str, setting: TierSetting, redis_pages: int, seed: int) -> None:
        super().__init__("spillway", setting, seed)
        self._tiers = ThreeTiers(name, setting, redis_pages)


def main(seeds: Sequence[int] = (1, 2), conversations: int = 700) -> None:
    """Print the share of pages held and the seconds of computing again, by policy and setting."""
    for rate, host, redis in SETTINGS:
        setting = TierSetting(rate=rate, host_pages=host, conversations=conversations)
        for name in POLICIES:
            found = [Below(name, setting, redis, seed).run() for seed in seeds]
            cells = [f"{100 * one.hit_rate:.1f} % {one.recompute_s:.0f} s" for one in found]
            sys.stdout.write(f"{rate:g}/s host {host} redis {redis} {name}: {', '.join(cells)}\n")


if __name__ == "__main__":
    main()
