"""V1, V1W, V1M and V2: rounds, verdicts and tables of known figures; settings; texts, data sets and the lean client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import search_hops, suite
from bench.document import BenchOptions, Body, Origin
from bench.figures import targets
from bench.figures.figure import NOT_THERE
from bench.mesh import limited_shards
from bench.mesh.memory_groups import GroupUse
from bench.peak import Speed
from bench.rivals import search_servers
from bench.rivals.pgvector_search import EXACT, WIDTHS, PgVectorServer
from bench.rivals.search_servers import EFS, Setting
from bench.rivals.vector_library import (
    BUILDS,
    FAISS,
    HNSWLIB,
    SVS,
    USEARCH,
    ladders,
    recall_of,
    search_s,
)
from bench.rounds import Rounds, measure_rounds, order
from bench.suites import v1, v1_process, v1_process_tables, v1_servers, v1m, v1w, v2, v6
from bench.suites.v1_process import WAYS, LibrarySide, ProcessCell, ProcessKept, best_other
from bench.suites.v1_query import QueryFound
from bench.suites.v1_servers import (
    LOADS,
    MANY,
    OURS,
    PGVECTOR,
    RIVALS,
    CallTimes,
    SearchLoad,
    ServedSide,
    ServersCell,
    Tried,
    best_rival,
    candidates,
    in_turns,
    judged,
    reached,
)
from bench.workloads import search_sets, texts, vectors
from bench.workloads.http_link import HttpError, answer_of, post
from bench.workloads.search_sets import BOUNDS, BUCKETS, TUNING, search_set

STILL = [Speed(1.0, 1.0), Speed(1.0, 1.0)]
SIDES = (OURS, *RIVALS)


# -- rounds


@given(st.integers(1, 6))
def test_everybody_comes_first_and_in_every_place_equally_often(count: int) -> None:
    """Over two turns of all sides each one was in every place twice, and before and after each other as often."""
    names = [str(number) for number in range(count)]
    rounds = [order(names, number) for number in range(2 * count)]

    places = Counter((name, at) for found in rounds for at, name in enumerate(found))
    assert set(places.values()) == {2}
    before = Counter(
        (a, b) for found in rounds for i, a in enumerate(found) for b in found[i + 1 :]
    )
    assert all(before[a, b] == before[b, a] for a in names for b in names if a != b)


async def test_all_sides_work_in_every_round() -> None:
    """Each rate is kept in its round; what is done to warm up counts nowhere."""
    calls = Counter[str]()

    async def rate(name: str) -> float:
        calls[name] += 1
        return float(calls[name])

    sides = {name: (lambda name=name: rate(name)) for name in "ab"}
    found = await measure_rounds(sides, rounds=5, block=2)

    assert found.rates == {name: [2.0, 3.0, 5.0, 6.0, 8.0] for name in "ab"}
    assert len(found.speeds) == 4


def test_rounds_of_a_block_that_moved_do_not_count() -> None:
    """The medians and ratios are of the other blocks; if no block was still, of all."""
    speeds = [Speed(1.0, 1.0), Speed(1.0, 1.0), Speed(1.0, 2.0)]
    found = Rounds({"a": [4.0, 4.0, 9.0, 9.0], "b": [2.0, 2.0, 9.0, 9.0]}, 2, speeds)

    assert (found.of("a"), found.dropped) == ([4.0, 4.0], 1)
    assert found.ratio("a", "b")["value"] == 2.0
    moved = Rounds({"a": [1.0, 2.0]}, 2, [Speed(1.0, 1.0), Speed(2.0, 1.0)])
    assert (moved.of("a"), moved.dropped) == ([1.0, 2.0], 0)


# -- settings


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 1e6)), min_size=1))
def test_only_settings_that_are_exact_enough_are_compared(tried: list[tuple[float, float]]) -> None:
    """All that reach the recall asked, and no other; where none does, the most exact one."""
    settings = [Tried({"ef": n}, *each) for n, each in enumerate(tried)]
    found = candidates(settings)

    enough = [each for each in settings if each.recall >= v1_servers.RECALL]
    assert found == enough or (not enough and len(found) == 1)
    assert max(each.recall for each in found) == max(each.recall for each in settings)


@pytest.mark.parametrize(
    ("rates", "beside"),
    [
        ({"a": (300.0, 0.96), "b": (256.0, 0.96)}, {"a", "b"}),  # both need no more than 3 s
        ({"a": (300.0, 0.96), "b": (255.0, 0.96)}, {"a"}),
        ({"a": (200.0, 0.96), "b": (150.0, 0.96)}, {"a"}),  # the best one, though slow
        ({"a": (200.0, 0.80), "b": (150.0, 0.96)}, {"b"}),  # of those that are exact enough
        ({"a": (12.0, 0.96), "b": (150.0, 0.80)}, set()),
        ({}, set()),
    ],
)
def test_a_cell_keeps_its_best_rival(
    rates: dict[str, tuple[float, float]], beside: set[str]
) -> None:
    """Slow rivals are only told, unless all are: then the best one stays, if its turns take less than a minute."""
    best = {name: Tried({}, recall, per_s) for name, (per_s, recall) in rates.items()}
    assert in_turns(best, 768) == beside


class _Exact:
    """Finds as much as its ef says; answers are what it was asked."""

    def __init__(self, truth: Any) -> None:
        self._truth, self.used = truth, list[Setting]()

    pids: tuple[int, ...] = ()

    def ladders(self, bound: int | None) -> Sequence[Sequence[Setting]]:
        return [[{"build": "m16", "ef": ef} for ef in EFS]]

    def widths(self, clients: int) -> Sequence[Setting]:
        return [{}]

    async def use(self, setting: Setting) -> None:
        self.used.append(setting)

    def calls(self, queries: Any, per: int, bound: int | None) -> list[range]:
        return [range(at, at + per) for at in range(0, len(queries), per)]

    async def send(self, call: range) -> range:
        return call

    def ids(self, answer: range) -> list[list[int]]:
        good = min(10, int(self.used[-1]["ef"]) // 5)
        return [[*self._truth[n][:good].tolist(), *[-1] * (10 - good)] for n in answer]


async def test_a_ladder_is_climbed_until_it_is_exact_enough_and_kept(tmp_path: Path) -> None:
    """Nothing beyond the first ef that is exact enough is tried; a second time nothing is tried at all."""
    options = BenchOptions(setup_dir=tmp_path)
    rows = search_set(search_sets.SetShape("clustered", 3000, 8, "clustered"), 1, tmp_path)
    server = _Exact(rows.truth(None, tuning=True))
    search_servers.kept(rows, PGVECTOR, options).mkdir(parents=True)
    tried = await v1_servers.tuned(server, PGVECTOR, rows, None, options)

    assert [each.setting["ef"] for each in tried] == list(EFS[: EFS.index(64) + 1])
    assert [each.recall >= 0.95 for each in tried].count(True) == 1
    assert [each.setting["ef"] for each in candidates(tried)] == [64]
    asked = len(server.used)
    assert await v1_servers.tuned(server, PGVECTOR, rows, None, options) == tried
    assert len(server.used) == asked


def test_pgvector_tries_connections_and_exact_search_of_filters() -> None:
    """One in flight needs one connection; a filter may be answered from the index of the number filtered by."""
    postgres: Any = None
    server = PgVectorServer(postgres, ("m16", "m24"))

    assert server.widths(1) == [{"connections": 1}]
    assert [each["connections"] for each in server.widths(8)] == [w for w in WIDTHS if w <= 8]
    assert len(server.ladders(100)) == len(server.ladders(None)) + 1
    assert server.ladders(100)[-1][0]["build"] == EXACT


async def test_a_closed_load_keeps_so_many_in_flight() -> None:
    """Every call is made by turns, with at most the clients' number open."""
    server = _Exact(np.zeros((4, 10), np.int64))
    most = 0
    load: SearchLoad

    async def send(call: range) -> range:
        nonlocal most
        most = max(most, load.in_flight)
        await asyncio.sleep(0)
        return call

    server.send = send  # type: ignore[method-assign]
    load = SearchLoad(server, [range(1), range(2)])
    run = await load.closed(3, count=12)

    assert (len(run.latencies), most) == (12, 3)


async def test_a_rival_whose_calls_take_too_long_is_told_and_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rate stands with the reason, and the other sides are measured."""
    monkeypatch.setattr(v1_servers, "SLOW_S", 1e-9)
    monkeypatch.setattr(v1_servers, "HOPELESS_S", 1e-9)
    monkeypatch.setattr(v1_servers, "origin", lambda: Origin("", dirty=False))
    options = BenchOptions(quick=True, setup_dir=tmp_path)
    rows = search_set(search_sets.SetShape("clustered", 3000, 8, "clustered"), 1, tmp_path)
    servers: dict[str, Any] = {}
    for name in (OURS, PGVECTOR):
        servers[name] = _Exact(np.vstack([rows.truth(None), rows.truth(None)]))
        search_servers.kept(rows, name, options).mkdir(parents=True)
    await servers[OURS].use({"build": "m16", "ef": 64})

    found = v1_servers.ServersKept()
    cell = await v1_servers._cell(servers, rows, LOADS[0], None, found, options)
    assert list(cell.sides) == [OURS]
    assert list(found.absent) == [f"{PGVECTOR} on {rows.name}/all, {LOADS[0].name}"]


@pytest.mark.parametrize(
    ("took", "per_s"),
    [
        ([5.0, 0.01, 2.0], 0.5),  # the index was read from the disk first
        ([5.0, 4.0], 0.25),  # slow it is
        ([0.01, 2.0], 0.5),
    ],
)
async def test_a_rival_that_reads_its_index_first_is_not_taken_for_slow(
    took: list[float], per_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that took seconds are made once more, and only the last run counts."""
    left = iter(took)

    class Timed(SearchLoad):
        async def closed(self, *_: Any, **__: Any) -> CallTimes:
            return CallTimes([1.0], next(left))

    monkeypatch.setattr(v1_servers, "SearchLoad", Timed)
    rows = search_set(search_sets.SetShape("clustered", 3000, 8, "clustered"), 1, tmp_path)
    setting = Tried({"build": "m16", "ef": 64}, 0.96, 100.0)
    server = _Exact(rows.truth(None))
    (found,) = await v1_servers._compared(server, [setting], rows, LOADS[0], None, 0.01)

    assert found.per_s == pytest.approx(per_s)
    assert not [*left]


# -- what is said


def _cell(load: str, rivals: dict[str, float], ours: float = 2.0) -> ServersCell:
    rates = {OURS: ours, **rivals}
    sides = {name: ServedSide({"ef": 10}, 0.96, {"p50": 0.001, "p99": 0.002}, 30) for name in rates}
    rounds = Rounds({name: [rate] * 20 for name, rate in rates.items()}, 20, STILL)
    return ServersCell("clustered, 50k x 128", load, "all", rounds, sides, 0.1, "c0ffee")


@pytest.mark.parametrize(
    ("load", "rates", "word"),
    [
        (MANY.name, {"pgvector": 0.5, "chroma": 0.4}, "goal"),
        (MANY.name, {"pgvector": 0.5, "chroma": 0.9}, "must"),
        (MANY.name, {"pgvector": 1.1, "chroma": 0.4}, "missed"),
        ("1 in flight", {"pgvector": 2.0, "chroma": 1.0}, "goal"),
        ("1 in flight", {"pgvector": 4.9, "chroma": 2.0}, "must"),
        ("1 in flight", {"pgvector": 5.5, "chroma": 1.0}, "missed"),
        ("1 in flight", {"pgvector": 1.0, "chroma": 2.2}, "missed"),
        ("1 in flight", {}, "not measured"),
    ],
)
def test_level_of_a_cell(load: str, rates: dict[str, float], word: str) -> None:
    """Four times (must: twice) the best at many queries a request; elsewhere all of them, or 0.4 of pgvector."""
    assert reached(_cell(load, rates)) == word


def test_who_decides_a_cell() -> None:
    """The best one alone; where that is pgvector, the best HTTP server beside it, except for many queries a request."""
    rates = {PGVECTOR: 3.0, "chroma": 1.0, "lancedb": 0.5}
    assert judged(_cell(MANY.name, rates)) == [PGVECTOR]
    assert judged(_cell("1 in flight", rates)) == [PGVECTOR, "chroma"]
    assert judged(_cell("1 in flight", rates | {"chroma": 3.5})) == ["chroma"]
    assert judged(_cell("1 in flight", {})) == []


def test_recall_below_what_is_asked_counts_for_nobody() -> None:
    """A cell is missed where ours is not exact enough; a rival that is not is no rival."""
    low = ServedSide({}, 0.93, {"p50": 0.001, "p99": 0.002}, 30)
    cell = _cell(LOADS[0].name, {PGVECTOR: 1.0, "chroma": 9.0})
    cell.sides["chroma"] = low
    assert (best_rival(cell), reached(cell)) == (PGVECTOR, "goal")
    cell.sides[OURS] = low
    assert reached(cell) == "missed"


def _process_cell(way: str, rates: dict[str, float], ours: float = 2.0) -> ProcessCell:
    every = {OURS: ours, **rates}
    sides = {name: LibrarySide({"build": "m24", "ef": 12}, 0.97) for name in every}
    rounds = Rounds({name: [rate] * 20 for name, rate in every.items()}, 20, STILL)
    return ProcessCell("clustered, 200k x 128", way, rounds, sides, "c0ffee")


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ({HNSWLIB: 1.3, FAISS: 2.0, USEARCH: 1.0}, ["goal", "goal"]),
        ({HNSWLIB: 1.4, FAISS: 1.0, SVS: 2.1}, ["must", "missed"]),
        ({HNSWLIB: 2.1}, ["missed"]),
        ({USEARCH: 1.9}, ["goal"]),
    ],
)
def test_level_in_process(rates: dict[str, float], words: list[str]) -> None:
    """Half as much again as hnswlib (must: as much), and as much as the best of the others; each where it is there."""
    body = Body()
    kept = ProcessKept({"a": _process_cell(WAYS[0].name, rates)})
    v1_process_tables.describe(kept, body)

    assert list(body.met.values()) == [*words, "goal"]
    assert body.tables[0]["rows"][0][-1] == " / ".join(words)
    assert [rival.measured for rival in body.rivals] == [name in rates for name in BUILDS]


def test_memory_and_builds_of_the_large_set() -> None:
    """More than 4 GiB of rows are hnswlib's and ours alone; what each takes stands beside them."""
    asked = {name: v1_process.builds(name, search_sets.LARGE, BenchOptions()) for name in BUILDS}
    assert asked == {HNSWLIB: ("m16",), FAISS: (), USEARCH: (), SVS: ()}

    cell = _process_cell(WAYS[0].name, {HNSWLIB: 1.0})
    cell.sides[OURS] = LibrarySide({}, 0.985, 5_000_000_000)
    cell.peak_bytes = 6_000_000_000
    body = Body()
    v1_process_tables.describe(ProcessKept({"a": cell}), body)
    memory = [
        dict(zip(body.tables[1]["columns"], row, strict=True))["memory (MB)"]
        for row in body.tables[1]["rows"]
    ]
    assert memory == ["5,000", "-"]
    assert any("6,000 MB" in note for note in body.notes)


def test_a_library_that_is_less_exact_does_not_count() -> None:
    """Equal recall is ours and 0.95; a cell in which ours has less is missed."""
    cell = _process_cell(WAYS[0].name, {HNSWLIB: 1.0, FAISS: 9.0, SVS: 1.0})
    cell.sides |= {
        OURS: LibrarySide({}, 0.985),
        FAISS: LibrarySide({}, 0.972),
        SVS: LibrarySide({}, 0.976),
    }
    assert (best_other(cell), v1_process.reached(cell, SVS, 1.0, 1.0)) == (SVS, "goal")
    cell.sides[OURS] = LibrarySide({}, 0.94)
    assert v1_process.reached(cell, SVS, 1.0, 1.0) == "missed"


class _Library:
    """Finds more with every step of a ladder."""

    def __init__(self) -> None:
        self.tried = list[str]()

    async def ask(self, _what: str, *, setting: Setting) -> float:
        self.tried.append(f"{setting['build']} {setting['ef']}")
        return 0.0

    async def answer(self, _what: str, **_work: int) -> dict[str, float]:
        ef = int(self.tried[-1].split()[1])
        return {"recall": min(1.0, 0.9 + ef / 1000), "seconds": 1.0}


async def test_a_ladder_of_a_library_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Each ladder is climbed to the recall asked; for more recall only what was not tried is tried."""
    options = BenchOptions(setup_dir=tmp_path)
    rows = search_set(search_sets.SetShape("clustered", 3000, 8, "clustered"), 1, tmp_path)
    search_servers.kept(rows, HNSWLIB, options).mkdir(parents=True)
    library: Any = _Library()
    first = await v1_process.tuned(library, HNSWLIB, rows, 0.95, options)
    begun = len(library.tried)
    more = await v1_process.tuned(library, HNSWLIB, rows, 0.96, options)

    assert [each.setting["ef"] for each in candidates(first)] == [56] * len(BUILDS[HNSWLIB])
    assert library.tried[begun:] == [f"{build} 64" for build in BUILDS[HNSWLIB]]
    assert len(more) == len(first) + len(BUILDS[HNSWLIB])
    assert await v1_process.tuned(library, HNSWLIB, rows, 0.95, options) == first


def test_ladders_differ_in_their_last_name_alone() -> None:
    """Every build of every library has its ladders, each of one build, with rising values of one name."""
    for library, made in BUILDS.items():
        found = ladders(library, tuple(made))
        assert {ladder[0]["build"] for ladder in found} == set(made)
        for ladder in found:
            *same, rising = ladder[0]
            assert len({tuple(step[name] for name in same) for step in ladder}) == 1
            values = [step[rising] for step in ladder]
            assert values == sorted(set(values))
        assert set(v1_process.LARGE_BUILDS[library]) <= set(made)


def test_recall_and_seconds_of_a_library() -> None:
    """All queries are searched, so many at once; some first for nothing."""
    rows = np.eye(16, dtype=np.float32)
    truth = np.argsort(-rows, axis=1, kind="stable")[:, :10]
    sizes = list[int]()

    def search(queries: Any) -> Any:
        sizes.append(len(queries))
        return np.argsort(-queries, axis=1, kind="stable")[:, :10].astype(np.uint32)

    assert recall_of(search, rows, truth) == 1.0
    assert recall_of(search, rows[::-1], truth) < 1.0
    sizes.clear()
    assert search_s(search, rows[:10], 4) > 0
    assert sizes == [4, 4, 4, 2]


def _kept() -> v1.SearchKept:
    kept = v1.SearchKept()
    for way in WAYS:
        speeds = {HNSWLIB: 1.0, FAISS: 1.5, USEARCH: 1.2, SVS: 0.9}
        kept.process.cells[f"process/{way.name}"] = _process_cell(way.name, speeds)
    setting = {"build": "m24", "ef": 12}
    kept.process.tried[f"clustered, 200k x 128/{HNSWLIB}"] = [Tried(setting, 0.97, 9.0)]
    rates = {"pgvector": 0.4, "chroma": 0.3, "lancedb": 0.2, "milvus-lite": 0.1}
    for load in LOADS:
        kept.servers.cells[f"servers/{load.name}"] = _cell(load.name, rates)
    for name in RIVALS:
        key = f"clustered, 50k x 128/all/{name}"
        kept.servers.tried[key] = [Tried({"ef": 10}, 0.9, 9.0), Tried({"ef": 16}, 0.96, 8.0)]
    times = {hop.name: [1e-4] * 9 for hop in search_hops.SEARCH_HOPS}
    alone, apart, steady = [1e-5] * 9, [9e-4] * 9, [8e-4] * 9
    kept.query = QueryFound("c", alone, apart, steady, times, {"router": 0.1}, "c0ffee")
    return kept


def test_v1_tables_verdicts_and_figures_agree() -> None:
    """All parts are judged, every figure of the summary is found, all rivals were measured, JSON keeps everything."""
    kept = _kept()
    body = v1.describe(msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=v1.SearchKept))

    assert set(body.met.values()) == {"goal"}
    for table in body.tables:
        assert all(len(cells) == len(table["columns"]) for cells in table["rows"])
    found = {"tables": body.tables, "met": body.met}
    figures = [figure for figure in targets.FIGURES if figure.row == "V1"]
    assert {figure.met for figure in figures} <= set(body.met)
    assert all(NOT_THERE not in figure.ours(found) and figure.rival(found) for figure in figures)
    assert suite.missing({"id": "V1", "rivals": msgspec.to_builtins(body.rivals)}) == []
    assert body.rivals[len(BUILDS)].best == {"clustered, 50k x 128, passes all:": "ef 10"}


@pytest.mark.parametrize("differs", ["processor", "commit"])
def test_parts_of_two_origins_are_told_apart(differs: str) -> None:
    """A note names each processor and commit with its sets; there is none where one of each measured everything."""
    kept = _kept()
    assert v1.origins(kept) == []

    for cell in kept.servers.cells.values():
        setattr(cell, differs, "another")
    cell = next(iter(kept.servers.cells.values()))
    assert f"On {cell.processor}, commit {cell.commit}: (b) {cell.set}." in v1.origins(kept)
    assert len(v1.origins(kept)) == 2


def test_v1_without_a_rival_says_so() -> None:
    """Nothing measured has no verdict; who is not set up stands with the reason."""
    kept = v1.SearchKept()
    kept.servers.absent = {"chroma on a set": "chroma is not set up"}
    kept.servers.cells["a"] = _cell(LOADS[0].name, {PGVECTOR: 1.0})
    body = v1.describe(kept, left=3)

    assert (body.left, set(body.met)) == (
        3,
        {"(b) every other cell", "(b) recall@10 ≥ 0.95 served"},
    )
    assert body.notes[-1] == "(b) chroma on a set was not measured: chroma is not set up"
    missing = suite.missing({"id": "V1", "rivals": msgspec.to_builtins(body.rivals)})
    assert set(missing) == {*BUILDS, *RIVALS} - {PGVECTOR}


def test_names_of_cells_are_what_only_asks_for() -> None:
    """A data set, a load and a filter are each in the name; no name holds another part's."""
    names = {
        v1_servers.cell_name(shape, load, bound)
        for shape in v1_servers.SHAPES
        for load in LOADS
        for bound in BOUNDS
    }
    assert len(names) == len(v1_servers.SHAPES) * len(LOADS) * len(BOUNDS)
    assert "servers/clustered, 200k x 128/256 a request/10 %" in names
    assert not any(v1.QUERY in name or "process/" in name for name in names)
    inside = {v1_process.cell_name(shape, way) for shape in v1_process.SHAPES for way in WAYS}
    assert len(inside) == len(v1_process.SHAPES) * len(WAYS)
    assert not any(v1.QUERY in name or "servers/" in name for name in inside)


def test_v1w_and_v2_are_judged() -> None:
    """Recall beside a writer and after churn; k whenever k match; figures of the summary are found."""
    beside = v1w.BesideFound("c", [0.01] * 9, [0.02] * 9, 0, 0.97, 0.96, 500.0)
    cold = v1w.ColdFound("c", 1000, 96, 2.5, False, 9_000_000, 8_000_000, 700_000)
    kept = v1w.WritesKept(beside, v1w.ChurnFound("c", 300, 0.97, 0.955), {"cold": cold})
    kept.budgets = _budgets({2.0: 1.5, 5.0: 4.0})
    body = v1w.describe(kept)
    assert list(body.met.values()) == ["goal", "missed", "goal"]
    assert body.tables[3]["rows"][0][3:] == ["9", "1000", "700", "384"]
    found = {"tables": body.tables, "met": body.met}
    for figure in (figure for figure in targets.FIGURES if figure.row == "V1W"):
        assert figure.cells({**found, "hot_path": None})[4] != NOT_THERE
        assert figure.met in body.met

    good = v2.FilterFound(1000, 100, 0, 0.96, ["filtered-exact"])
    assert set(v2.describe(v2.FiltersKept("c", {"random/1 %": good})).met.values()) == {"goal"}
    short = msgspec.structs.replace(good, short=1, recall=0.9)
    assert set(v2.describe(v2.FiltersKept("c", {"a/1 %": short})).met.values()) == {"missed"}


def _budgets(took_ms: dict[float, float], searches: int = 100) -> v1w.BudgetsFound:
    seen = {
        budget: v1w.BudgetSeen(
            [took] * searches, [2 * took] * searches, [64] * searches, [True] * searches, 0, 0.97
        )
        for budget, took in took_ms.items()
    }
    return v1w.BudgetsFound("c", seen, (0.5, 9.0))


def test_time_budgets_are_judged_by_the_searches_that_were_to_fit() -> None:
    """One of a hundred may be late; what was said not to fit counts nowhere, and no fitting one is no verdict."""
    found = _budgets({2.0: 1.0, 10.0: 8.0})
    (table,) = v1w.describe(v1w.WritesKept(budgets=found)).tables
    assert table["rows"][1] == [
        "10",
        "100",
        "0",
        "100",
        "100.00 %",
        "0.00 %",
        "0.80",
        "0.80",
        "64",
        "0.9700",
    ]

    late = found.seen[2.0]
    for count, word in ((1, "goal"), (2, "missed")):
        late.took_ms[:count] = [3.0] * count
        assert v1w.describe(v1w.WritesKept(budgets=found)).met == {"within their time budget": word}
    late.fits[:2] = [False, False]
    assert late.within(late.took_ms, 2.0) == 1.0
    for seen in found.seen.values():
        seen.fits = [False] * 100
    body = v1w.describe(v1w.WritesKept(budgets=found))
    assert (body.met, body.tables[0]["rows"][0][3:8]) == (
        {"within their time budget": "not measured"},
        ["0", "-", "-", "-", "-"],
    )


def _limits(served: dict[str, tuple[float, float]]) -> v1m.LimitsKept:
    kept = v1m.LimitsKept("c", 1000, 1024)
    for name, (share, recall) in served.items():
        limit = int(share * kept.bytes) // len(limited_shards.SHARDS)
        kept.cells[name] = v1m.LimitFound(share, limit, [0.01] * 9, 1.0, 0, recall, 5.0, 300_000)
    return kept


def test_v1m_names_the_least_memory_that_serves() -> None:
    """Less than half of the rows' bytes is the goal; what was killed, failed or found too little does not serve."""
    names = {share: v1m.cell_name(v1m.SERVED, share) for share in (0.0, 1.0, 0.49, 0.4)}
    kept = _limits({name: (share, 0.97) for share, name in names.items()})
    filled = v1m.cell_name(v1m.FILLED, 0.75)
    kept.cells |= _limits({filled: (0.75, 0.96)}).cells
    limited_shards.used(kept.cells[names[0.4]], {"a": GroupUse(9, 9, 1), "b": GroupUse(9, 8, 0)})
    body = v1m.describe(msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=v1m.LimitsKept))

    assert list(body.met.values()) == ["goal", "missed"]
    assert body.tables[1]["rows"] == [
        ["serves", "0.49", "2007", "4096"],
        ["is filled", "0.75", "3072", "4096"],
    ]
    assert body.notes == ["serves within 0.4: killed: out of memory"]
    assert all(len(row) == len(body.tables[0]["columns"]) for row in body.tables[0]["rows"])
    found = {"tables": body.tables, "met": body.met, "hot_path": None}
    figures = [figure for figure in targets.FIGURES if figure.row == "V1M"]
    assert [figure.cells(found)[4] for figure in figures] == [
        "0.49: 2007 bytes a vector of 4096",
        "0.75: 3072 bytes a vector of 4096",
    ]
    kept.cells[names[0.49]].failed = 1
    assert list(v1m.describe(kept).met.values()) == ["missed", "missed"]
    kept.cells[names[0.49]].failed, kept.cells[names[0.49]].recall = 0, 0.94
    assert list(v1m.describe(kept).met.values()) == ["missed", "missed"]


def test_v6_compares_lists_with_an_exact_scan() -> None:
    """Lists must serve at the recall, and ten times as many queries a second; a graph does not count as lists."""
    lists = v6.LimitedFound(v6.LISTS, [0.004] * 900, 1.0, 0, 0.96, 500.0, effort="ivfpq 16")
    exact = v6.LimitedFound(v6.EXACT, [0.05] * 80, 1.0, 0, 1.0, 500.0, effort="exact exact")
    kept = v6.LargerKept("c", 1000, 128, 300 << 20, 60.0, {v6.LISTS: lists, v6.EXACT: exact})
    body = v6.describe(msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=v6.LargerKept))

    assert body.met == {v6.SERVED: "goal", v6.RATIO: "goal"}
    assert all(len(row) == len(body.tables[0]["columns"]) for row in body.tables[0]["rows"])
    found = {"tables": body.tables, "met": body.met, "hot_path": None}
    figures = [figure for figure in targets.FIGURES if figure.row == "V6"]
    assert [figure.cells(found)[4] for figure in figures] == [
        "0.9600 at 900 queries/s, 500 rows/s written",
        "11.2 times: 900 and 80 queries/s",
    ]
    lists.written_per_s = 400.0
    assert v6.describe(kept).met[v6.SERVED] == "missed"
    lists.written_per_s, lists.effort = 500.0, "graph 32"
    assert v6.describe(kept).met[v6.SERVED] == "missed"
    lists.effort, lists.kills, lists.why = "ivfpq 16", 1, "killed: out of memory"
    body = v6.describe(kept)
    assert set(body.met.values()) == {"missed"}
    assert "inverted lists: killed: out of memory" in body.notes


def test_v1m_says_what_it_lacks(tmp_path: Path) -> None:
    """Without a cgroup that may be written nothing is measured, and the reason stands."""
    assert "--cgroup DIR" in limited_shards.why_not(None)
    body = v1m.run(BenchOptions(quick=True, cgroup=tmp_path, setup_dir=tmp_path / "setup"))

    assert set(body.met.values()) == {"not measured"}
    assert "expected a cgroup directory" in body.notes[0]
    assert not (tmp_path / "setup").exists()


def test_recall_beside_a_writer_is_of_the_rows_known_then(tmp_path: Path) -> None:
    """Rows that came later may stand for one of the known; a known one that is missing may not."""
    rows = search_set(search_sets.SetShape("clustered", 3000, 8, "clustered"), 1, tmp_path)
    new = rows.queries[:1].repeat(4, axis=0)
    truth = rows.truth(None)[0].tolist()

    assert v1w.recall(rows, new, [v1w.Seen(0, 0, truth)]) == 1.0
    later = [3000, 3001, *truth[:8]]
    assert v1w.recall(rows, new, [v1w.Seen(0, 0, later)]) == 1.0
    assert v1w.recall(rows, new, [v1w.Seen(0, 4, truth)]) == pytest.approx(0.6)


# -- hops of a search


@given(st.lists(st.floats(0.001, 0.1), min_size=1, max_size=20), st.sets(st.integers(0, 9)))
def test_hops_of_a_search_are_its_whole_latency(lengths: list[float], unmarked: set[int]) -> None:
    """A stage without marks is in the next hop; the marks of the search before count for nothing."""
    stages = [hop.ends for hop in search_hops.SEARCH_HOPS[1:-1]]
    moments: dict[str, dict[str, float]] = {"came": {}}
    asked, at = [], 1.0
    for number, length in enumerate(lengths):
        done = at + length
        asked.append((at, done))
        for place, stage in enumerate(["came", *stages]):
            if place == 0 or place not in unmarked:
                moments.setdefault(stage, {})[str(number)] = at + length * (place + 1) / 12
        at = done + 0.01
    times = search_hops.measure(asked, moments)

    assert [sum(parts) for parts in zip(*times.values(), strict=True)] == pytest.approx(lengths)
    assert all(value >= 0 for values in times.values() for value in values)
    assert len(search_hops.rows(times)) == len(search_hops.SEARCH_HOPS) + 1


# -- data


def test_a_data_set_is_made_once_and_its_truth_is_true(tmp_path: Path) -> None:
    """Queries to tune with are others than those measured; the truth of a filter is among the rows that pass."""
    shape = search_sets.SetShape("clustered", 3000, 8, "clustered")
    made = search_set(shape, 1, tmp_path)
    again = search_set(shape, 1, tmp_path)

    assert (len(made.tuning), len(made.queries)) == (TUNING, vectors.TEST)
    assert all(np.array_equal(made.truths[bound], again.truths[bound]) for bound in BOUNDS)
    passed = made.buckets[made.truth(10)]
    assert passed.max() < 10
    exact = np.argmax(made.queries @ made.base.T, axis=1)
    assert np.array_equal(made.truth(None)[:, 0], exact)
    assert set(np.bincount(made.places, minlength=BUCKETS)) == {3}


def test_pieces_of_a_page() -> None:
    """Text of paragraphs in pieces, without scripts and without what is too short."""
    long = "word " * 50
    page = f"<head><title>{long}</title></head><script>{long}</script><p>{long}</p><p>short</p><pre>{'x' * 50}</pre>"
    found = list(texts.pieces(page))

    assert [len(each) for each in found] == [vectors.PIECE, 249 - vectors.PIECE, 50]
    assert "".join(found[:2]) == long.strip()


def test_too_few_texts_are_said(tmp_path: Path) -> None:
    """A machine without the texts gets a reason, not a smaller set."""
    (tmp_path / "usr" / "share" / "doc").mkdir(parents=True)
    for name in texts.MANUALS:
        (tmp_path / f"{name}.complete").touch()
    with pytest.raises(texts.NoTextsError, match="manuals: 0 pieces; expected 10"):
        texts.manuals(10, tmp_path, 1)


# -- the lean client


@given(st.binary(max_size=300), st.integers(1, 50), st.booleans())
def test_answers_are_read_however_they_come_in(body: bytes, cut: int, chunked: bool) -> None:
    """Nothing is an answer until all of it has come, by its length or in chunks."""
    if chunked:
        parts = [body[at : at + cut] for at in range(0, len(body), cut)]
        sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    else:
        sent, head = body, b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    whole = head + sent

    assert answer_of(whole) == body
    assert all(answer_of(whole[:end]) is None for end in range(0, len(whole), 7))


def test_an_answer_that_is_no_success_is_an_error() -> None:
    """The status and what the server says of it are in the error."""
    with pytest.raises(HttpError, match="429 Too Many: busy"):
        answer_of(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy")
    assert post("http://a:1", "/b", b"{}").endswith(b"Content-Length: 2\r\n\r\n{}")
