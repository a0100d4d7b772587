"""Policies: each offers what it was given, least value first, and forgets what was discarded."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import get_args

import numpy as np
import pytest

from common.pages.identity import PageId
from common.types.pages import Eviction
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import NAMES, Policy, make_policy


def chain(*tokens: int) -> list[PageId]:
    """Pages that hold one token each: every id names all before it."""
    return [blake2b(bytes(tokens[: n + 1]), digest_size=16).digest() for n in range(len(tokens))]


def policy(name: str, history: History) -> Policy:
    return make_policy(name, history, lambda depth: 1.0 + 0.5 * depth)


def test_configuration_knows_every_policy() -> None:
    """What can be configured is what there is."""
    assert get_args(Eviction) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_older_session_goes_first_and_leading_pages_before_others(name: str) -> None:
    """Two sessions of equal length: the older goes first, from the front."""
    history = History()
    tier = policy(name, history)
    old, new = chain(1, 2, 3), chain(4, 5, 6)
    for pages, now_s in ((old, 1.0), (new, 90.0)):
        history.begin(pages[:2], now_s)
        history.end(pages, now_s + 1)
        for page in pages:
            tier.add(page)

    assert tier.victims(3, 100.0) == old
    for page in old:
        tier.discard(page)
    assert len(tier) == 3
    assert tier.victims(9, 100.0) == new


@pytest.mark.parametrize("name", NAMES)
def test_what_no_chain_has_named_is_offered_too(name: str) -> None:
    """After a restart a tier has pages of sessions nobody knows yet; their chain may come later."""
    history = History()
    tier = policy(name, history)
    pages = chain(1, 2, 3)
    for page in reversed(pages):
        tier.add(page)

    assert sorted(tier.victims(3, 5.0)) == sorted(pages)
    history.begin(pages, 6.0)
    assert sorted(tier.victims(3, 7.0)) == sorted(pages)
    assert name == "s3fifo" or tier.victims(3, 7.0) == pages


def test_bad_input_is_named() -> None:
    """An unknown policy, seconds that are none, a page in two places."""
    history = History()
    with pytest.raises(ValueError, match="eviction policy 'mru': expected one of lru, "):
        policy("mru", history)
    for back_s in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"back_s .* expected seconds"):
            policy("spillway", history).add(b"p", back_s)
    history.begin([b"a", b"b"], 0.0)
    with pytest.raises(ValueError, match="62 stands at position 0 and in another"):
        history.begin([b"b"], 1.0)
    with pytest.raises(ValueError, match="63 stands at position 2"):
        history.begin([b"a", b"c", b"c"], 1.0)
    assert np.isfinite(history.idleness(2.0)).all()
