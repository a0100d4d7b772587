"""H1's cells, sweeps, readings of streams and verdicts, from known figures."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.document import BenchOptions
from bench.figures import targets
from bench.mesh.probe import MeshError
from bench.pairs import rounds_within
from bench.peak import Speed
from bench.rivals import llama_server
from bench.rivals.llama_server import BASE, TRIED
from bench.rivals.sweep import Setting, Swept, best, sweep
from bench.suites import h1, h1_tables
from bench.workloads.chat_rounds import (
    LLAMA,
    NEW_TOKENS,
    OURS,
    CellTimes,
    ChatCell,
    ChatKept,
    SideTimes,
    still,
)
from bench.workloads.conversations import ORDINARY
from bench.workloads.divergence import Divergence
from bench.workloads.streamed_batch import BatchError, StreamSeen, prompts, read_stream
from loadgen import stats


def test_every_cell_of_the_targets_is_there_once() -> None:
    """128 tokens come first and 8k last; each of S, M, L has bf16, int8 and int4."""
    found = h1.cells()

    assert len(found) == len(set(found)) == 3 * (6 + 6 + 5)
    assert [cell.prompt for cell in found][:27] == [128] * 27
    assert {cell.model for cell in found if cell.prompt == 8192} == {"L", "M"}
    assert {cell.streams for cell in found if cell.prompt == 2048} == {1, 8}
    assert h1.cells("L/int8/128 x 8") == [ChatCell("L", "int8", 128, 8)]
    assert all(name in h1_tables.groups() for name in map(h1_tables.group_of, found))


@pytest.mark.parametrize(
    ("cell", "goal", "must"),
    [
        (ChatCell("L", "int8", 8192, 1), 1.0, 1.0),
        (ChatCell("L", "int8", 128, 32), 2.0, 1.0),
        (ChatCell("M", "bf16", 2048, 8), 1.5, 0.9),
        (ChatCell("S", "int4", 128, 32), 1.5, 0.9),
    ],
)
def test_levels_are_the_targets(cell: ChatCell, goal: float, must: float) -> None:
    """One stream must not be slower; several 1.5 times as fast, int8 twice; on S and M 0.9 will do."""
    assert (h1_tables.goal_of(cell), h1_tables.must_of(cell)) == (goal, must)


@given(
    st.dictionaries(st.integers(0, 99), st.integers(1, 5), min_size=1), st.sampled_from((0.5, 0.99))
)
def test_quantile_of_counts_is_that_of_the_values(counts: dict[int, int], share: float) -> None:
    """Nearest rank: at least `share` of all values are not above it, and it is the first such value."""
    values = sorted(value for value, count in counts.items() for _ in range(count))
    found = stats.quantile(counts, share)

    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)
    assert stats.quantile({}, share) == 0


def test_prompts_share_no_beginning() -> None:
    """The same seed gives the same prompts; no two of many begin with the same page, and none holds a special token."""
    seeds = [f"1 L/bf16/128 x 32 {number}" for number in range(20)]
    found = [prompt for seed in seeds for prompt in prompts(32, 128, 8192, seed)]

    assert found[:32] == prompts(32, 128, 8192, seeds[0])
    assert len({tuple(prompt[:32]) for prompt in found}) == len(found)
    assert all(len(prompt) == 128 and min(prompt) >= ORDINARY for prompt in found)


def _event(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"text": text}]}) + b"\n\n"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20), st.integers(0, 1000))
def test_stream_is_read_however_it_was_cut(sizes: list[int], seed: int) -> None:
    """Tokens, events and moments are found wherever the connection's reads end."""
    draw = random.Random(seed)
    tokens = [[draw.randrange(999) for _ in range(size)] for size in sizes]
    raw = b"".join(_event(" ".join(f"w{token}" for token in each)) for each in tokens)
    raw += _event("") + b"data: [DONE]\n\n"
    cuts = sorted(draw.randrange(len(raw)) for _ in range(draw.randrange(8)))
    edges = [0, *cuts, len(raw)]
    parts = [(float(n), raw[a:b]) for n, (a, b) in enumerate(pairwise(edges))]
    found = read_stream(parts, 99.0)

    assert found.answer == [token for each in tokens for token in each]
    assert found.chunks == sizes
    assert found.first_s + sum(found.gaps_s) == pytest.approx(found.last_s)
    later = len(found.answer) - found.early
    assert found.token_s * later == pytest.approx(found.last_s - found.first_s if later else 0)


def test_answer_without_a_token_is_an_error() -> None:
    """What a server said instead is in the message."""
    with pytest.raises(BatchError, match="no room"):
        read_stream([(0.0, b'data: {"error": "no room"}\n\n')], 1.0)


async def test_sweep_builds_on_the_best_and_survives_failures() -> None:
    """Each variant is tried on the best so far; one that does not start is recorded with its reason."""
    seen: list[Setting] = []

    async def rate(setting: Setting) -> float:
        seen.append(setting)
        if setting["cache-type"] == "bf16":
            raise MeshError("it does not start")
        return (2.0 if setting["flash-attn"] == "off" else 1.0) + int(setting["ubatch-size"]) / 1e4

    tried = await sweep(rate, BASE, TRIED, (MeshError,))

    assert seen[0] == BASE
    assert len(tried) == len(TRIED) + 1
    assert best(tried)["flash-attn"] == "off"
    assert best(tried)["ubatch-size"] == 2048
    assert [each.why for each in tried if not each.rate] == ["it does not start"]


async def test_a_reason_names_what_was_raised_and_no_place_of_this_machine() -> None:
    """Of a traceback the last line stays, of a path in it the last name."""

    async def rate(_setting: Setting) -> float:
        raise MeshError(
            'File "/home/someone/.env/lib/a.py", line 5\nOSError: no /srv/x-1/weights.bin\n'
        )

    tried = await sweep(rate, BASE, (), (MeshError,))

    assert [each.why for each in tried] == ["OSError: no weights.bin"]


def test_server_has_a_slot_for_every_stream() -> None:
    """A slot's context holds prompt and answer, caches are apart, prompts are not kept; greedy either way."""
    words = llama_server.flags({**BASE, "flash-attn": "on"}, 8, 2144)
    named = dict(pairwise(words))

    assert int(named["--ctx-size"]) // int(named["--parallel"]) == 2304
    assert named["--flash-attn"] == "on"
    assert {"--no-kv-unified", "--no-cache-prompt"} <= set(words)
    assert llama_server.request(BASE) == {"ignore_eos": True, "cache_prompt": False}
    assert llama_server.request({**BASE, "samplers": "top_k"})["top_k"] == 1


def test_rounds_fit_into_the_time() -> None:
    """As many as were asked for, fewer if they are slow, a few in any case."""
    assert rounds_within(900, 1.0, 300) == 300
    assert rounds_within(900, 30.0, 300) == 30
    assert rounds_within(900, 500.0, 300) == 4
    assert rounds_within(900, 500.0, 2) == 2


def _side(seconds: Iterable[float]) -> SideTimes:
    side = SideTimes()
    for each in seconds:
        gaps = [each / NEW_TOKENS] * (NEW_TOKENS - 1)
        answer = [7] * NEW_TOKENS
        side.add([StreamSeen(each / 10, each, each, 1, gaps, [1] * NEW_TOKENS, answer)])
    return side


def _cell(sides: Mapping[str, SideTimes], speeds: list[tuple[float, float]]) -> CellTimes:
    found = [Speed(*speed) for speed in speeds]
    return CellTimes(dict(sides), found, 2, {"flash-attn": "on"}, "c0ffee", 4, 3)


def test_moved_machine_is_left_out() -> None:
    """Rounds of a block during which either speed moved do not count; if both blocks moved, all do."""
    sides = {OURS: _side([1, 1, 9, 9]), LLAMA: _side([2, 2, 9, 9])}
    cell = ChatCell("L", "bf16", 128, 1)
    found = _cell(sides, [(100, 20), (101, 20), (101, 30)])
    (pairs,) = h1_tables.pairs_of(cell, found)

    assert still(found) == [True, True, False, False]
    assert [batch.seconds for batch in pairs.ours] == [1, 1]
    assert pairs.dropped == 1
    (pairs,) = h1_tables.pairs_of(cell, _cell(sides, [(100, 20), (10, 20), (100, 20)]))
    assert (len(pairs.ours), pairs.dropped) == (4, 2)


def _kept() -> ChatKept:
    rates = [(100.0, 20.0)] * 3
    fast = _cell({OURS: _side([1.0] * 4), LLAMA: _side([2.0] * 4)}, rates)
    slow = _cell({OURS: _side([1.0] * 4), LLAMA: _side([0.5] * 4)}, rates)
    swept = {"L/bf16/128": [Swept(dict(BASE), 3.0), Swept({**BASE, "flash-attn": "on"}, 0.0, "no")]}
    return ChatKept({"L/bf16/128 x 1": fast, "L/bf16/128 x 8": fast, "L/int4/128 x 8": slow}, swept)


def test_tables_and_verdicts_of_known_cells() -> None:
    """A group's verdict is its worst cell's; what has no cell is not measured; the figures name the worst cell."""
    kept = _kept()
    kept.failed["M/bf16/128 x 1"] = "status 429"
    body = h1.describe(kept, BenchOptions(), left=48)

    assert body.left == 48
    assert body.met["tokens/s, M, one stream"] == "missed"
    assert any("M/bf16/128 x 1 failed: status 429" in note for note in body.notes)
    assert body.met["tokens/s, L, one stream"] == "goal"
    assert body.met["tokens/s, L, 8 and 32 streams, bf16 and int4"] == "missed"
    assert body.met["tokens/s, S, one stream"] == "not measured"
    assert body.met["p99 gap"] == body.met["at most 4 tokens a chunk"] == "goal"
    assert body.tables[0]["rows"][0][:7] == [
        "L", "BF16", "128 x 1", LLAMA, "64.0", "32.0", "2.000 [2.000, 2.000]",
    ]  # fmt: skip
    assert {len(table["columns"]) for table in body.tables[:1]} == {10}
    for table in body.tables:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert [rival.measured for rival in body.rivals] == [True, False]
    assert body.rivals[0].best["flash-attn"] == "auto"
    assert any("75.0% of 12 answers" in note for note in body.notes)
    found = msgspec.to_builtins(body) | {"id": "H1"}
    told = {f.met: f.cells(found) for f in targets.FIGURES if f.row == "H1"}
    assert set(told) <= set(body.met)
    cells = told["tokens/s, L, 8 and 32 streams, bf16 and int4"]
    assert cells[4:] == [
        "0.500 [0.500, 0.500] (Q4_0, 128 x 8)",
        f"{LLAMA}: 1024.0 tokens/s",
        "missed",
    ]


def test_cell_whose_weights_lost_more_than_the_rivals_has_missed() -> None:
    """Speed counts only beside a KL divergence that is no worse; the row shows both."""
    kept = _kept()
    kept.cells["L/int8/128 x 8"] = kept.cells["L/bf16/128 x 8"]
    worse = Divergence([2e-3, 2.1e-3, 2.2e-3], [1e-3, 1e-3, 1e-3])
    kept.divergence = {"int8": worse}
    body = h1.describe(kept, BenchOptions())

    assert body.met["tokens/s, L, one stream"] == "goal"
    assert body.met["tokens/s, L, 8 and 32 streams, int8"] == "missed"
    rows = {row[1]: row for row in body.tables[0]["rows"]}
    assert rows["Q8_0"][7:9] == ["missed", "2.1e-03 / 1.0e-03"]
    assert rows["BF16"][8] == "-"
    kept.divergence = {"int8": Divergence(worse.theirs, worse.ours)}
    body = h1.describe(kept, BenchOptions())
    assert body.met["tokens/s, L, 8 and 32 streams, int8"] == "goal"


def test_what_was_measured_is_stored_whole() -> None:
    """What is kept between runs comes back equal, and JSON can hold it."""
    kept = _kept()
    raw = msgspec.msgpack.encode(kept)

    assert msgspec.msgpack.decode(raw, type=ChatKept) == kept
    assert msgspec.json.decode(msgspec.json.encode(h1.describe(kept, BenchOptions()).samples))
    batch = kept.cells["L/bf16/128 x 1"].sides[OURS].batches[0]
    assert (batch.seconds, batch.first_s) == (1.0, [0.1])
    assert batch.token_s == pytest.approx([0.9 / 63])
