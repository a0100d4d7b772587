"""Simulate two tiers under conversations on a virtual clock: the work that each policy makes be computed again."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.simulation.kv_traces import THINK_S, tokens, turns
from common.pages.identity import PAGE, PageId
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import Policy, make_policy

TOKEN_S = 0.03  # of one generated token
OTHER_S = 32 * 167e-6  # computing a page but for its attention: OPT-13B on one A100
LONGEST = 16384
DROPS = 16  # what a full host drops at once
AHEAD = 0.25  # of the device's pages are kept free


@dataclass(frozen=True, slots=True)
class TierSetting:
    """A load and the tiers that serve it.

    `rate`: turns a second; `attention`: seconds of a page's attention at 4,096 tokens, in units of the rest;
    `one_by_one`: a full host asks DROPS times for one victim, not once for DROPS. By conversations that makes a
    difference, as one victim is a whole conversation.
    """

    rate: float
    host_pages: int
    device_pages: int = 52_428 // PAGE
    attention: float = 0.25
    conversations: int = 1100
    one_by_one: bool = True

    def price(self, depth: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds to recompute the pages at these positions."""
        return OTHER_S * (1.02 + self.attention * (depth + 1) * PAGE / 4096)


@dataclass(slots=True)
class TurnPages:
    """Pages of earlier turns that a turn needed; how many were held, and what the others cost."""

    past: int = 0
    hits: int = 0
    recompute_s: float = 0.0
    waits: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the share of pages that were held."""
        return self.hits / max(1, self.past)

    @property
    def recomputed_tokens(self) -> int:
        """Return the tokens that were computed again."""
        return (self.past - self.hits) * PAGE


@dataclass(slots=True)
class SimulatedConversation:
    """One conversation: turns left, tokens and full pages so far."""

    number: int
    left: int
    tokens: int = 0
    pages: list[PageId] = field(default_factory=list)

    def add(self, more: int) -> None:
        """Let it have so many tokens more."""
        self.tokens += more
        for place in range(len(self.pages), self.tokens // PAGE):
            self.pages.append(f"{self.number}/{place}".encode())


class Tiers:
    """A device and a host, each full of pages: what leaves the device goes to the host, what leaves that is lost."""

    def __init__(self, name: str, setting: TierSetting) -> None:
        self._setting = setting
        self.history = History()
        # By conversations means that the host drops whole ones; the device hands over page by page, as always.
        above = "lru" if name == "lru-conversation" else name
        self.device = make_policy(above, self.history, setting.price)
        self.host = make_policy(name, self.history, setting.price)
        self.running = 0  # pages of running turns, which may not leave
        self.on_device: set[PageId] = set()
        self.on_host: set[PageId] = set()

    @property
    def free(self) -> int:
        """Pages of the device that nobody has."""
        return self._setting.device_pages - self.running - len(self.on_device)

    def take(self, pages: list[PageId]) -> list[int]:
        """Pages are in use from now on; return the positions of those that are in no tier."""
        lost = []
        for place, page in enumerate(pages):
            if page in self.on_device:
                _remove(page, self.on_device, self.device)
            elif page in self.on_host:
                _remove(page, self.on_host, self.host)
            else:
                lost.append(place)
        return lost

    def release(self, pages: list[PageId]) -> None:
        """Pages are not in use any more."""
        for page in pages:
            self.on_device.add(page)
            self.device.add(page)

    def hand_over(self, count: int, now_s: float) -> None:
        """Move `count` pages from the device to the host, or all there are."""
        for page in self.device.victims(count, now_s):
            _remove(page, self.on_device, self.device)
            if len(self.on_host) >= self._setting.host_pages:
                self._drop(now_s)
            self.on_host.add(page)
            self.host.add(page)

    def _drop(self, now_s: float) -> None:
        """Make room in the host."""
        rounds, count = (DROPS, 1) if self._setting.one_by_one else (1, DROPS)
        for _ in range(rounds):
            for gone in self.host.victims(count, now_s):
                _remove(gone, self.on_host, self.host)


def _remove(page: PageId, held: set[PageId], policy: Policy) -> None:
    held.remove(page)
    policy.discard(page)


class TierSimulation:
    """Conversations that come, each turn after an answer and a pause, until all have ended."""

    def __init__(self, name: str, setting: TierSetting, seed: int) -> None:
        self._setting, self._draw = setting, random.Random(seed)
        self._tiers, self.outcome = Tiers(name, setting), TurnPages()
        self._events: list[tuple[float, int, SimulatedConversation, tuple[int, int], bool]] = []
        self._order = 0
        at_s = 0.0
        for number in range(setting.conversations):
            at_s += self._draw.expovariate(setting.rate / 5.56)
            self._push(at_s, SimulatedConversation(number, turns(self._draw)), tokens(self._draw))

    def run(self) -> TurnPages:
        """Let everything happen; return what came of it."""
        while self._events:
            now_s, _, who, size, ends = heapq.heappop(self._events)
            if ends:
                self._end(now_s, who, size)
            elif who.tokens + sum(size) <= LONGEST:
                self._begin(now_s, who, size)
        return self.outcome

    def _push(
        self, at_s: float, who: SimulatedConversation, size: tuple[int, int], *, ends: bool = False
    ) -> None:
        heapq.heappush(self._events, (at_s, self._order, who, size, ends))
        self._order += 1

    def _begin(self, now_s: float, who: SimulatedConversation, size: tuple[int, int]) -> None:
        tiers, outcome, setting = self._tiers, self.outcome, self._setting
        whole = -(-(who.tokens + sum(size)) // PAGE)
        if whole > setting.device_pages - tiers.running:
            outcome.waits += 1
            self._push(now_s + 1, who, size)
            return
        lost = tiers.take(who.pages)
        tiers.running += whole
        tiers.hand_over(-tiers.free, now_s)
        outcome.past += len(who.pages)
        outcome.hits += len(who.pages) - len(lost)
        outcome.recompute_s += float(setting.price(np.asarray(lost, dtype=np.float64)).sum())
        who.add(size[0])
        tiers.history.begin(who.pages, now_s)
        tiers.hand_over(int(AHEAD * setting.device_pages) - tiers.free, now_s)
        self._push(now_s + size[1] * TOKEN_S, who, size, ends=True)

    def _end(self, now_s: float, who: SimulatedConversation, size: tuple[int, int]) -> None:
        who.add(size[1])
        self._tiers.running -= -(-who.tokens // PAGE)
        self._tiers.history.end(who.pages, now_s)
        self._tiers.release(who.pages)
        who.left -= 1
        if who.left:
            pause_s = self._draw.expovariate(1 / THINK_S)
            self._push(now_s + pause_s, who, tokens(self._draw))
