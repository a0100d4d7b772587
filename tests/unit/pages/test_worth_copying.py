"""Copies in lower tiers: a page that nobody is going to read is not worth the writing; a page that may return is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pages.identity import PageId
from engine.decoder.executor.interface import ModelShape
from engine.decoder.kv.eviction.history import MOST_RETURNS, History
from engine.decoder.kv.tiers import UNLIKELY, PageTiers, TierPolicy

PAGES, LENGTH = 64, 4  # pages of each tier, and of a session's first turn


class Load:
    """Sessions in two tiers, of which a share returns; a page takes a millisecond to compute."""

    def __init__(self, copy_s: float, *, sinks: bool = True) -> None:
        keeping = TierPolicy(
            price=lambda depths: np.full(len(depths), 0.001),
            save_s=lambda: copy_s,
            put_s=lambda: copy_s,
        )
        shape = ModelShape([None], [1], PAGES, 4096, 2, host_pages=PAGES)
        self.tiers = PageTiers(shape, keeping)
        self.saved = self.sunk = 0
        self._sinks = sinks
        self._names = iter(range(10**6))

    def run(self, turns: int, returning: float, seed: int) -> None:
        """Begin a session each second; a session returns with probability `returning`, after 5 to 60 seconds."""
        draw, back = random.Random(seed), list[tuple[float, list[PageId]]]()
        for _ in range(turns):
            now_s = self.tiers.now_s = self.tiers.now_s + 1.0
            due = [chain for due_s, chain in back if due_s <= now_s]
            back = [each for each in back if each[0] > now_s]
            for chain in [*due, self._pages(LENGTH)]:
                self._turn(chain)
                if draw.random() < returning:
                    back.append((now_s + draw.uniform(5, 60), [*chain, *self._pages(1)]))
            self._copy()

    def _pages(self, count: int) -> list[PageId]:
        return [b"%d" % next(self._names) for _ in range(count)]

    def _turn(self, chain: list[PageId]) -> None:
        device, host = self.tiers.device[0], self.tiers.host[0]
        self.tiers.history.begin(chain, self.tiers.now_s)
        for page_id in chain:
            if device.find(page_id) is None and host.find(page_id) is not None:
                page, move = self.tiers.load(0, page_id)
                assert move is not None
                self.tiers.moved(move, sound=True)
                device.release(page)
            elif device.find(page_id) is None:
                page = device.allocate()
                device.publish(page, page_id)
                device.release(page)
        self.tiers.history.end(chain, self.tiers.now_s)

    def _copy(self) -> None:
        while moves := self.tiers.saves(8):
            self.saved += len(moves)
            for move in moves:
                self.tiers.moved(move, sound=True)
        while self._sinks and (sinking := self.tiers.sinking(0, 8)):
            self.sunk += len(sinking)
            for page_id in sinking:
                self.tiers.sunk(0, page_id)
        self.tiers.check()


@given(st.floats(0, 1e5))
def test_of_an_unknown_load_every_page_is_worth_a_copy(idle_s: float) -> None:
    """Before any session was seen idle for as long, each page may return, whatever copying takes."""
    history = History()
    history.begin([b"a"], 0.0)
    history.end([b"a"], 0.0)

    assert history.returns([b"a"], idle_s)[0] > UNLIKELY


def test_a_page_in_no_chain_may_return() -> None:
    """Nothing is known of a page that no turn has named."""
    assert History().returns([b"a"], 0.0)[0] == MOST_RETURNS


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_never_return_are_not_copied(seed: int) -> None:
    """What is copied at first, for want of knowledge, is not copied once sessions were seen not to return."""
    load = Load(copy_s=0.0004)
    load.run(200, 0.0, seed)
    early = load.saved, load.sunk
    load.run(200, 0.0, seed + 10)

    assert early[0] > 0
    assert (load.saved, load.sunk) == early


@pytest.mark.parametrize("seed", range(3))
def test_conversations_that_return_are_copied(seed: int) -> None:
    """Most pages of sessions that return go down, though the copies cost a quarter of what they save."""
    load = Load(copy_s=0.00025)
    load.run(400, 0.8, seed)

    assert load.saved > 400 * LENGTH
    assert load.sunk > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_load_that_begins_to_return_is_learned(seed: int) -> None:
    """After prompts that never returned, conversations are copied again."""
    load = Load(copy_s=0.00025)
    load.run(200, 0.0, seed)
    before = load.saved
    load.run(400, 0.8, seed + 10)

    assert load.saved > before + 200 * LENGTH


@pytest.mark.parametrize("seed", range(3))
def test_a_full_host_gives_up_few_pages_for_pages_that_are_as_likely(seed: int) -> None:
    """Without a tier below, a full host takes a page only for one that is less likely to be used."""
    roomy, full = Load(copy_s=0.00025), Load(copy_s=0.00025, sinks=False)
    roomy.run(400, 0.8, seed)
    full.run(400, 0.8, seed)

    assert 0 < full.saved < roomy.saved / 2
