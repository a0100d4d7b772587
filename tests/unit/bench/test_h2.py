"""H2's frozen shape, its arrivals, the load that a product carries, and verdicts from known rounds."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.document import BenchOptions
from bench.figures import targets
from bench.peak import Peak, Speed
from bench.rivals import llama_server
from bench.rivals.assembled_stack import CHANGES, divisions, varied
from bench.rivals.pgvector import packed
from bench.suites import h2
from bench.workloads import mixed_runs
from bench.workloads.mixed_load import (
    CHAT,
    EMBED,
    INGEST,
    KINDS,
    OBJECTIVES,
    SEARCH,
    SHAPE,
    Counted,
    Hold,
    Served,
    Stack,
    TextCorpus,
    due,
    meets,
)
from bench.workloads.mixed_runs import (
    Climb,
    FactorRound,
    LoadStep,
    MixKept,
    capacity,
    shares_of,
    steps,
)


def test_objectives_and_shape_are_the_frozen_ones() -> None:
    """Who changes one of these measures both sides anew."""
    assert OBJECTIVES.first_s == OBJECTIVES.embed_s == 1.0
    assert (OBJECTIVES.token_s, OBJECTIVES.search_s, OBJECTIVES.ingest_s) == (0.1, 0.2, 10.0)
    assert dict(SHAPE.per_s) == {CHAT: 0.5, EMBED: 2.0, SEARCH: 10.0, INGEST: 1.0}
    assert (SHAPE.prompt_tokens, SHAPE.new_tokens) == ((64, 256), (32, 96))
    assert (SHAPE.texts, SHAPE.k, SHAPE.rows, SHAPE.documents) == (16, 10, 10_000, 8)
    assert (h2.LEVEL, h2.GOAL, h2.MUST, h2.ROUNDS) == (0.99, 1.5, 1.0, 5)


@given(st.sampled_from(h2.FACTORS), st.integers(0, 9))
def test_both_sides_get_the_same_arrivals(factor: float, seed: int) -> None:
    """The same name gives the same moments; each kind has its own; their rate is the factor's."""
    name = f"{seed}-{factor:g}"
    first, second = (
        {kind: list(itertools.islice(times, 50)) for kind, times in due(factor, name).items()}
        for _ in range(2)
    )

    assert first == second
    assert list(first) == list(KINDS)
    assert first[CHAT] != first[EMBED]
    assert first[INGEST][1] == pytest.approx(1 / (factor * SHAPE.per_s[INGEST]))


@pytest.mark.parametrize(
    ("kind", "served", "met"),
    [
        (CHAT, Served(0.0, 9.0, 1.0, 0.1), True),
        (CHAT, Served(0.0, 9.0, 1.01, 0.05), False),
        (CHAT, Served(0.0, 9.0, 0.5, 0.11), False),
        (SEARCH, Served(0.0, 0.2), True),
        (SEARCH, Served(0.0, 0.21), False),
        (EMBED, Served(0.0, 1.01), False),
        (INGEST, Served(0.0, 9.9), True),
        (SEARCH, Served(0.0, 0.1, code="status 429"), False),
    ],
)
def test_objective_of_each_kind(kind: str, served: Served, met: bool) -> None:
    """A chat has two limits, the others one; what failed or was refused meets none."""
    assert meets(kind, served) is met


@given(
    st.dictionaries(st.floats(0.1, 10), st.floats(0, 1), min_size=1),
    st.sampled_from(h2.LEVELS),
)
def test_capacity_lies_between_what_held_and_what_did_not(
    shares: dict[float, float], level: float
) -> None:
    """It is above every factor before the first that fell short, below that one, and rises with no higher level."""
    found = capacity(shares, level)
    short = min((factor for factor in shares if shares[factor] < level), default=None)

    assert found >= max((f for f in shares if short is None or f < short), default=0.0)
    assert found <= (max(shares) if short is None else short)
    assert found >= capacity(shares, 0.995)


def test_capacity_is_interpolated() -> None:
    """Between a share of 1 at 1 and 0.9 at 2 the level of 0.99 lies at 1.1; before the first factor likewise."""
    assert capacity({1.0: 1.0, 2.0: 0.9}, 0.99) == pytest.approx(1.1)
    assert capacity({1.0: 0.9}, 0.99) == pytest.approx(0.1)
    assert capacity({1.0: 1.0, 2.0: 0.995}, 0.99) == 2.0


def _counts(met: int) -> dict[str, Counted]:
    return {kind: Counted(100, 100 if kind == CHAT else met) for kind in KINDS}


def test_shares_are_those_of_the_worst_kind_over_rounds() -> None:
    """A factor that a round did not reach has none; steps during which the machine moved neither count nor end."""
    one = {1.0: LoadStep(_counts(100)), 2.0: LoadStep(_counts(80), still=False)}
    two = {1.0: LoadStep(_counts(90)), 2.0: LoadStep(_counts(96)), 4.0: LoadStep(_counts(50))}
    three = {1.0: LoadStep(_counts(80))}

    assert shares_of([one, two]) == {1.0: 0.95, 2.0: 0.96, 4.0: 0.5}
    assert shares_of([one, two, three]) == {1.0: 0.9, 2.0: 0.0, 4.0: 0.0}
    assert shares_of([one]) == {1.0: 1.0, 2.0: 0.8}


def test_divisions_use_all_cores_and_only_them() -> None:
    """No division has more threads of a server than cores; halves are apart; every variant is of the best."""
    for cores in (2, 8):
        found = divisions(cores)
        assert len({each.name for each in found}) == len(found)
        assert all(1 <= each.chat_threads <= cores for each in found)
    apart = divisions(4)[2]
    assert apart.chat_words() == ["taskset", "-c", "0-1"]
    assert apart.embed_words(5) == ["taskset", "-c", "2-3", "nice", "-n", "5"]
    assert all(varied(apart, change).chat_cores == "0-1" for change in CHANGES)
    words = llama_server.flags(llama_server.BASE, 8, 384, threads=1)
    assert words[words.index("--threads") + 1] == "1"


def test_vector_travels_as_pgvector_sends_it() -> None:
    """Dimension, two zero bytes, then big-endian float32."""
    assert packed(np.asarray([1.5, -2.0], np.float32)) == struct.pack(">HHff", 2, 0, 1.5, -2.0)


def _hold(late: bool) -> Hold:
    ok, slow = Served(20.0, 0.05, 0.1, 0.01), Served(20.0, 12.0, 2.0, 0.5)
    return Hold({kind: [ok] * 8 + [slow if late else ok] * 2 for kind in KINDS}, 0.1)


def _kept() -> MixKept:
    rounds = []
    for number in range(3):
        rounds.append(FactorRound(number, 1.0, {h2.OURS: _hold(False), h2.THEIRS: _hold(True)}))
        rounds.append(FactorRound(number, 2.0, {h2.OURS: _hold(False)}))
        rounds.append(FactorRound(number, 4.0, {h2.OURS: _hold(True)}))
    # A fourth round was left before either side had too much.
    rounds.append(FactorRound(3, 1.0, {h2.OURS: _hold(False), h2.THEIRS: _hold(False)}))
    first = divisions(2)
    tried = [
        Climb(first[0].name, msgspec.to_builtins(first[0]), {"1": _hold(True)}),
        Climb(first[1].name, msgspec.to_builtins(first[1]), {"1": _hold(False)}),
        Climb("broken", msgspec.to_builtins(first[2]), {}, "it did not\nstart"),
    ]
    return MixKept(tried, rounds, {h2.OURS: 0.97})


def test_fewer_than_three_rounds_decide_nothing() -> None:
    """A round alone has an interval without width, and two have next to none: the level stays open."""
    kept = _kept()
    kept.rounds = [each for each in kept.rounds if each.round < 2]
    body = h2.describe(kept, BenchOptions())
    assert body.tables[0]["rows"][-1][-1] == "2"
    assert body.met["goodput"] == "undecided"


def test_tables_and_verdict_of_known_rounds() -> None:
    """The load at the level, its ratio and verdict, the best setting, the summary's figure; JSON keeps all of it."""
    kept = _kept()
    body = h2.describe(kept, BenchOptions())
    row = body.tables[0]["rows"][-1]

    assert h2.best(kept.tried, h2.WARM_S).name == "half the threads each"
    assert row[:3] == ["99%", "28.4", "0.7"]
    assert row[4] == body.met["goodput"] == "goal"
    assert [each[-1] for each in body.tables[2]["rows"]] == ["", "best", "start"]
    assert row[-1] == "3"
    assert any(
        note.startswith("Rounds left before both sides had too much: 1.") for note in body.notes
    )
    for table in body.tables:
        assert all(len(cells) == len(table["columns"]) for cells in table["rows"])
    (figure,) = (figure for figure in targets.FIGURES if figure.row == "H2")
    assert figure.cells(msgspec.to_builtins(body))[4].endswith("28.4 requests/s")
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(body.samples)), MixKept)


class _Load:
    """A load of which one side falls short in its first `bad` holds."""

    bad = 0

    def __init__(self, *_: object) -> None:
        pass

    def once(self) -> list[Callable[[], Awaitable[object]]]:
        return []

    async def hold(self, *_: object) -> Hold:
        _Load.bad -= 1
        return _hold(_Load.bad >= 0)


class _Peak(Peak):
    """Speeds of which every other one is half of the one before, for as long as told."""

    def __init__(self, moving: int) -> None:
        self._moving, self._calls = moving, 0

    def now(self) -> Speed:
        self._calls += 1
        return Speed(50.0 if self._calls % 2 == 0 and self._calls <= self._moving else 100.0, 10.0)


@pytest.mark.parametrize(
    ("moving", "bad", "shares", "holds"),
    [
        (2, 1, {1.0: 1.0, 2.0: 1.0}, 3),  # measured again, and then nobody fell short
        (0, 1, {1.0: 0.8}, 1),  # the speed did not move: the climb ends
        (99, 9, {1.0: 0.8}, 3),  # moved again each time: the last try is kept
        (99, 0, {1.0: 1.0, 2.0: 1.0}, 2),  # moved, but nobody fell short
    ],
)
async def test_moved_step_that_ends_a_climb_is_measured_again(
    moving: int,
    bad: int,
    shares: dict[float, float],
    holds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is measured again for all sides, at most three times in all."""
    monkeypatch.setattr(mixed_runs, "MixedLoad", _Load)
    monkeypatch.setattr(mixed_runs, "SETTLE_S", 0.0)
    monkeypatch.setattr(_Load, "bad", bad)
    pieces, stack = cast("TextCorpus", None), cast("Stack", SimpleNamespace(pids=[]))
    runs = mixed_runs.MixedRuns(BenchOptions(), pieces, SHAPE)

    ladder = mixed_runs.Ladder((1.0, 2.0), 1.0, 0.0, 0.9)
    await runs._round(0, {h2.OURS: stack}, ladder, _Peak(moving))

    assert shares_of(steps(runs.kept.rounds, h2.OURS, 0.0)) == shares
    assert _Load.bad == bad - holds


def test_nothing_measured_is_said() -> None:
    """A run that was left before both sides climbed has no verdict and says what is left."""
    body = h2.describe(MixKept(absent={h2.THEIRS: "not set up"}), BenchOptions(), left=3)

    assert (body.met, body.left) == ({}, 3)
    assert not any(rival.measured for rival in body.rivals)
    assert body.notes[-1] == f"{h2.THEIRS} was not measured: not set up"
