"""History: sessions by their chains, what they share, what is forgotten, what is learned of their returns."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pages.identity import PageId
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import make_policy

PATHS = st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=30)


def chain(path: str) -> list[PageId]:
    """Return pages of which each id names all before it."""
    return [path[: n + 1].encode() for n in range(len(path))]


def rate(history: History, page: PageId, now_s: float) -> float:
    return float(history.hazards(now_s)[history.node(page).slot])


@given(PATHS)
def test_every_chain_is_a_way_down_the_tree(paths: list[str]) -> None:
    """Whatever is taken, each page stands once, at its position, and its parents hold what stands before it."""
    history = History()
    for number, path in enumerate(paths):
        history.begin(chain(path), float(number))

    assert len(history) == len({page for path in paths for page in chain(path)})
    for path in paths:
        found: list[PageId] = []
        node = history.node(chain(path)[-1])
        assert node.pages[: len(path) - node.start] == chain(path)[node.start :]
        while node.parent is not None:
            node = node.parent
            found = node.pages + found
        assert found == chain(path)[: len(found)]
        assert [history.depth(page) for page in chain(path)] == list(range(len(path)))


@given(PATHS)
def test_idleness_counts_every_session_once(paths: list[str]) -> None:
    """A chain that extends a session's continues it, so as many sessions are left as no other chain continued."""
    history, tips = History(), set[str]()
    for path in paths:
        history.begin(chain(path), 0.0)
        known = [tip for tip in tips if path.startswith(tip)]
        tips -= {max(known, key=len, default="")}
        tips.add(path)

    idleness = history.idleness(2.0)
    roots = {history.node(chain(path)[0]).slot for path in paths}
    assert sum(idleness[slot] for slot in roots) == pytest.approx(len(tips) / 2)


@given(PATHS, st.integers(1, 20))
def test_memory_is_bounded(paths: list[str], limit: int) -> None:
    """Above the limit names are forgotten, of sessions first that nobody came back to; what a tier holds stays."""
    history = History(limit)
    tier = make_policy("spillway", history, np.ones_like)
    history.begin(chain("bbbb"), 0.0)
    tier.add(b"bb")
    for number, path in enumerate(paths):
        history.begin(chain(path), float(number))

        assert len(history) <= max(limit, 8 + 8)  # the session held, and the last
        assert history.depth(b"bb") == 1
    tier.discard(b"bb")
    for other in (b"x", b"y"):
        history.begin([other], 99.0)
    assert len(history) <= max(limit, 1)
    assert tier.victims(9, 99.0) == []


def test_a_forgotten_session_is_known_again_by_its_chain() -> None:
    """Forgetting costs a session's past, nothing else."""
    history = History(limit=3)
    for number, path in enumerate(("aaa", "bbb")):
        history.begin(chain(path), float(number))
    assert history.depth(b"bbb") == 2
    assert history.last_s(b"aaa") == 1.0  # not known: as if just now
    history.end(chain("aaa"), 2.0)
    assert history.depth(b"aaa") == 2


def test_an_empty_chain_is_no_session() -> None:
    """A prompt shorter than a page names nothing; the turn is seen when it ends."""
    history = History()
    history.begin([], 1.0)
    assert len(history) == 0
    history.end(chain("a"), 2.0)
    assert history.uses[history.node(b"a").slot] == 1


@pytest.mark.parametrize("what", ["answer", "length", "turn"])
def test_who_returns_is_learned(what: str) -> None:
    """Sessions of a kind that came back are expected back: by pages of answer, by length of the chain, by turn."""
    history, draw = History(), random.Random(1)
    names = iter(range(10**6))

    def one(*, again: bool, now_s: float) -> list[PageId]:
        name = next(names)
        prompt = 12 if what == "length" and not again else 3
        answer = 9 if what == "answer" and not again else 1
        pages = [f"{name}/{n}".encode() for n in range(prompt + answer)]
        history.begin(pages[:prompt], now_s)
        history.end(pages, now_s)
        return pages

    back: list[tuple[float, list[PageId]]] = []
    for step in range(1500):
        now_s = float(step)
        for due_s, pages in [each for each in back if each[0] <= now_s]:
            back.remove((due_s, pages))
            history.begin(pages, now_s)
            history.end(pages, now_s)
            if what == "turn":
                back.append((now_s + draw.uniform(5, 30), pages))
        again = draw.random() < (0.1 if what == "turn" else 0.5)
        pages = one(again=again, now_s=now_s)
        if again:
            back.append((now_s + draw.uniform(5, 30), pages))
    likely, unlikely = one(again=True, now_s=1500.0), one(again=False, now_s=1500.0)
    if what == "turn":
        history.begin(likely, 1500.0)
        history.end(likely, 1500.0)

    assert rate(history, likely[0], 1510.0) > 2 * rate(history, unlikely[0], 1510.0)


def test_rates_are_finite_whatever_time_does() -> None:
    """Idle for nothing, for years, a clock that steps back: a rate is a positive number."""
    history = History()
    for number in range(200):
        history.begin(chain("ab" * (1 + number % 3)), float(number % 7))
        history.end(chain("ab" * (1 + number % 3)), float(number % 7))
    for now_s in (0.0, 6.0, 1e9):
        rates = history.hazards(now_s)
        assert np.isfinite(rates).all()
        assert (rates > 0).sum() == sum(history.parent >= -1) - (len(history.parent) - history.size)
        assert math.isfinite(float(history.idleness(now_s).sum()))
