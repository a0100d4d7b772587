"""Eviction by value against brute force: the true least values, leading pages first, under any calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.pages.identity import PageId
from engine.decoder.kv.eviction.history import FLOOR_S, History
from engine.decoder.kv.eviction.policy import NAMES, make_policy
from engine.decoder.kv.eviction.value import ASKED

# A chain is a path in a tree of few branches, so that sessions share pages, part and repeat.
CHAINS = st.text("ab", min_size=1, max_size=6).map(
    lambda path: [path[: n + 1].encode() for n in range(len(path))]
)
STRANGERS = st.sampled_from([b"x", b"y"])  # no chain names them
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["begin", "end"]), CHAINS, st.sampled_from([0.0, 0.001, 1.0, 30.0])),
        st.tuples(
            st.just("add"),
            st.one_of(CHAINS.map(lambda chain: chain[-1]), STRANGERS),
            st.sampled_from([math.inf, math.inf, 0.0, 0.3, 2.0]),
        ),
        st.tuples(st.just("discard"), CHAINS.map(lambda chain: chain[-1]), st.just(0.0)),
    ),
    max_size=40,
)  # fmt: skip


def price(depth: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 + 0.5 * depth


class Known:
    """What was called, kept as plainly as possible: sessions by their chains, copies by page."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sessions: dict[tuple[PageId, ...], float] = {}
        self.held: dict[PageId, float] = {}

    def turn(self, chain: Sequence[PageId]) -> None:
        new = tuple(chain)
        known = [old for old in self.sessions if new[: len(old)] == old]
        if known:
            del self.sessions[max(known, key=len)]
        self.sessions[new] = self.now_s

    def rate(self, page: PageId, now_s: float) -> float:
        mine = [last_s for chain, last_s in self.sessions.items() if page in chain]
        return sum(1 / max(now_s - last_s, FLOOR_S) for last_s in mine)


def play(
    operations: list[tuple[str, list[PageId] | PageId, float]], history: History, name: str
) -> tuple[Known, list[list[PageId]]]:
    """Do what is asked, on two tiers of one history; return what is known and what the first offers in the end."""
    tier, other = make_policy(name, history, price), make_policy(name, history, price)
    known = Known()
    for what, where, value in operations:
        if isinstance(where, list):
            known.now_s += value
            getattr(history, what)(where, known.now_s)
            known.turn(where)
        elif what == "add":
            tier.add(where, value)
            other.add(where)
            known.held[where] = value
        else:
            tier.discard(where)
            known.held.pop(where, None)
        assert len(tier) == len(known.held)
    offers = [tier.victims(count, known.now_s + 2) for count in (0, 1, 3, 99)]
    return known, offers


@given(OPERATIONS)
def test_pensieve_drops_the_least_value(
    operations: list[tuple[str, list[PageId] | PageId, float]],
) -> None:
    """Value = min(recompute, fetch) / idle, summed over the sessions of the page; among equals leading pages first."""
    known, offers = play(operations, History(), "pensieve")
    if not all(any(page in chain for chain in known.sessions) for page in known.held):
        return  # what no chain names is held to less

    def value(page: PageId) -> tuple[float, int]:
        depth = len(page) - 1
        cost = min(float(price(np.float64(depth))), known.held[page])  # type: ignore[arg-type]
        return round(cost * known.rate(page, known.now_s + 2), 9), depth

    values = sorted(map(value, known.held))
    for count, found in zip((0, 1, 3, 99), offers, strict=True):
        assert [value(page) for page in found] == values[:count]


@given(OPERATIONS)
def test_spillway_drops_the_least_value(
    operations: list[tuple[str, list[PageId] | PageId, float]],
) -> None:
    """The same with learned rates, which are the sum of a node's own and those below it."""
    history = History()
    known, offers = play(operations, history, "spillway")
    rates = history.hazards(known.now_s + 2)

    def value(page: PageId) -> tuple[float, int]:
        depth = history.depth(page)
        cost = min(float(price(np.float64(depth))), known.held[page])  # type: ignore[arg-type]
        return cost * float(rates[history.node(page).slot]), depth

    values = sorted(map(value, known.held))
    for count, found in zip((0, 1, 3, 99), offers, strict=True):
        assert [value(page) for page in found] == values[:count]


@pytest.mark.parametrize("name", NAMES)
@given(operations=OPERATIONS, limit=st.sampled_from([1, 4, 1000]))
def test_only_what_is_there_is_offered(
    name: str, operations: list[tuple[str, list[PageId] | PageId, float]], limit: int
) -> None:
    """Every policy offers pages that were added and not discarded, each once, and all of them if asked."""
    known, offers = play(operations, History(limit), name)

    for count, found in zip((0, 1, 3, 99), offers, strict=True):
        assert len(set(found)) == len(found)
        assert set(found) <= set(known.held)
        whole = name == "lru-conversation"
        assert (
            len(found) >= min(count, len(known.held))
            if whole
            else len(found) == min(count, len(known.held))
        )


def test_a_way_back_lowers_the_value() -> None:
    """A copy that another tier has too goes before one that would have to be computed, wherever it stands."""
    history = History()
    tier = make_policy("pensieve", history, price)
    history.end([b"a", b"ab", b"abc"], 0.0)
    for page in (b"a", b"ab", b"abc"):
        tier.add(page)
    assert tier.victims(3, 1.0) == [b"a", b"ab", b"abc"]
    tier.add(b"abc", 0.01)
    assert tier.victims(3, 1.0) == [b"abc", b"a", b"ab"]
    tier.add(b"abc")
    assert tier.victims(3, 1.0) == [b"a", b"ab", b"abc"]


@pytest.mark.parametrize("name", ["pensieve", "spillway"])
def test_pages_that_sessions_share_stay_longer(name: str) -> None:
    """What two sessions began with is worth the sum, more than what either has alone."""
    history = History()
    tier = make_policy(name, history, np.ones_like)
    for number, chain in enumerate(([b"a", b"ab", b"aba"], [b"a", b"ab", b"abb"], [b"b", b"bb"])):
        history.end(chain, float(number))
        for page in chain:
            tier.add(page)

    order = tier.victims(6, 10.0)
    assert set(order[-2:]) == {b"a", b"ab"}
    assert order.index(b"aba") < order.index(b"abb")


def test_prices_are_asked_for_again() -> None:
    """A price that changes as it is fitted is heard, though not for copies that are there already."""
    history, slow = History(), [1.0]
    tier = make_policy("pensieve", history, lambda depth: np.full_like(depth, slow[0]))
    history.end([b"a"], 0.0)
    history.end([b"b"], 0.0)
    tier.add(b"b")
    slow[0] = 0.5
    for _ in range(ASKED):
        tier.add(b"a")
        tier.discard(b"a")
    tier.add(b"a")

    assert tier.victims(1, 1.0) == [b"a"]
