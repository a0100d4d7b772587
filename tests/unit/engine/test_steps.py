"""Steps that raise, and what a generator may hold: only the guilty fail, and depth follows the measured speed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost.step import Step
from common.pages.identity import PAGE
from common.types.generation import SamplingParams
from common.wire.registry import WorkerRecord
from engine.decoder.capacity import PROMPTS, PROMPTS_S, DecoderCapacity, prompts_beside
from engine.decoder.executor.interface import (
    EarlyEnd,
    PageLoads,
    SampledToken,
    SamplingRequest,
    SequenceInput,
    StepFailed,
)
from engine.decoder.executor.simulated_executor import SimulatedExecutor
from engine.decoder.executor.step import StepFailure, run_step
from engine.decoder.sequence import TokenSequence
from services.adapters.generate.loop import with_capacity

BAD_ROW, BAD_BATCH = 1, 2  # token ids that make the runner raise for one sequence, or for all


class Fragile(SimulatedExecutor):
    """Raises as a real runner does: naming the sequence, or not."""

    def __init__(self) -> None:
        super().__init__(alpha_s=0.0, beta_s=0.0)

    def execute(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,
        early: EarlyEnd | None = None,
    ) -> list[SampledToken | None]:
        for index, rows in enumerate(batch):
            if BAD_ROW in rows.tokens:
                raise StepFailed(index, "its numbers are not finite")
        if any(BAD_BATCH in rows.tokens for rows in batch):
            raise MemoryError("too large")
        return super().execute(batch, loading, early)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=12))
def test_only_the_guilty_fail(rows: list[tuple[int, int]]) -> None:
    """Whoever raises fails with all its sequences; everyone else gets the token it would get alone."""
    runner = Fragile()
    jobs = [f"job{job}" for job, _ in rows]
    bad = {job for job, token in zip(jobs, (t for _, t in rows), strict=True) if token in {1, 2}}
    batch = [
        SequenceInput(
            [token], [0], [[0]], SamplingRequest(SamplingParams(), 0, 1, [job, token], [])
        )
        for job, token in rows
    ]
    ran = run_step(runner.execute, batch, jobs)

    for part, job, outcome in zip(batch, jobs, ran.outcomes, strict=True):
        if job in bad:
            assert isinstance(outcome, StepFailure)
            assert outcome.message in {"its numbers are not finite", "MemoryError: too large"}
        else:
            assert [outcome] == SimulatedExecutor(alpha_s=0, beta_s=0).execute([part])
    assert ran.isolated == bool(bad) or len(set(jobs)) == 1


def probes(beta: float, row: float) -> list[tuple[Step, float]]:
    """What a device without noise shows, whose steps cost `beta` and `row` a row."""
    steps = [
        Step(1, 1, 1),
        Step(32, 32, 32),
        Step(8, 8, 8),
        Step(1, 512, 512 * 256),
        Step(1, 1, 4000),
    ]
    return [(step, beta + row * step.rows) for step in steps]


def test_depth_follows_the_speed() -> None:
    """Depth is what is computed within the deadline; a slower device tells less, but never less than a few jobs."""
    pace = DecoderCapacity(probes(0.01, 0.0001), slo_s=100.0, context=4096)
    token_s = (0.01 / 32 + 0.01 / 512) / 2 + 0.0001
    assert pace.token_s == pytest.approx(token_s)
    assert pace.depth == (int(100 / token_s) // 32, int(100 / token_s))
    record = with_capacity(
        WorkerRecord(worker="w", classes=["gpu"], device="cpu", depth_items=0, depth_tokens=0),
        pace,
    )
    assert (record.depth_tokens, record.alpha_tokens_s) == (pace.depth.tokens, pace.token_s)
    assert record.beta_s == pytest.approx(0.0101)
    for number in range(500):
        step = Step(8, 8 + number % 3, 8000)
        pace.cost.observe(step, 2 * (0.01 + 0.0001 * step.rows))
    assert pace.cost.seconds(Step(8, 8, 8000)) == pytest.approx(0.0216, rel=0.02)
    assert pace.depth.tokens < 0.75 * 100 / token_s
    assert not pace.moved()  # not so soon after the last time
    slow = DecoderCapacity(probes(1.0, 10.0), slo_s=1.0, context=4096)
    assert slow.depth == (1024, 4 * 4096)


@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.floats(1e-4, 0.5),
    st.floats(1e-6, 1e-2),
    st.integers(32, 2048),
)
def test_running_streams_keep_their_pace(
    streams: int, prompts: int, beta: float, row: float, most: int
) -> None:
    """Rows of prompts fit into the streams' pace, or a step that is longer by the prompts for each stream."""
    pace = DecoderCapacity(probes(beta, row), slo_s=100.0, context=4096, itl_s=0.1)
    decoding = Step(streams, streams, streams * 100)

    rows = pace.budget(decoding, prompts, most)

    if not streams:
        assert most <= rows <= PROMPTS * most
        assert rows == most or row * rows <= 1.01 * PROMPTS_S
        assert rows == PROMPTS * most or row * (rows + 1) >= 0.99 * PROMPTS_S
        return
    assert rows <= most
    if rows < most:
        assert rows >= streams + PAGE
        alone = beta + row * streams
        if rows > streams + PAGE:
            with_prompt = beta + row * rows
            longest = 2.5 * alone * (streams + prompts) / streams
            assert with_prompt <= 1.01 * max(0.1, longest)
            assert beta + row * (rows + 1) >= 0.99 * longest
    assert rows <= pace.budget(decoding, prompts + 1, most)


def test_prompts_without_a_slot_or_of_low_priority_do_not_slow_other_streams() -> None:
    """A prompt makes a step longer only if it has a slot, and is not of lower priority than a stream that decodes."""

    def sequence(order: int, *, low: bool, decodes: bool = False) -> TokenSequence:
        made = TokenSequence(str(order), 0, order, [1, 2], root=b"", most=9, low=low)
        if decodes:
            made.todo = [(1, 2)]
            made.pages = [[0]]
        assert made.decodes is decodes
        return made

    waiting = [sequence(3, low=False), sequence(4, low=True), sequence(5, low=True)]
    normal, low = sequence(1, low=False, decodes=True), sequence(2, low=True, decodes=True)
    assert prompts_beside([normal, low], waiting, 64) == 1
    assert prompts_beside([low], waiting, 64) == 3
    assert prompts_beside([low], waiting, 3) == 2
    assert prompts_beside([normal, sequence(6, low=False)], waiting, 2) == 1
