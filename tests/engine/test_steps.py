"""Steps that raise, and what a generator may hold: only the guilty fail, and depth follows the measured speed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.cost.linear import LinearCost
from common.messages import Sampling, WorkerRecord
from services.gpu_worker.decide.batch import Draw, Drawn, Rows, StepFailed
from services.gpu_worker.pace import Measured, Pace
from services.gpu_worker.sim import SimRunner
from services.gpu_worker.steps import Failure, run_step

BAD_ROW, BAD_BATCH = 1, 2  # token ids that make the runner raise for one sequence, or for all


class Fragile(SimRunner):
    """Raises as a real runner does: naming the sequence, or not."""

    def __init__(self) -> None:
        super().__init__(alpha_s=0.0, beta_s=0.0)

    def execute(self, batch: Sequence[Rows]) -> list[Drawn | None]:
        for index, rows in enumerate(batch):
            if BAD_ROW in rows.tokens:
                raise StepFailed(index, "its numbers are not finite")
        if any(BAD_BATCH in rows.tokens for rows in batch):
            raise MemoryError("too large")
        return super().execute(batch)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=12))
def test_only_the_guilty_fail(rows: list[tuple[int, int]]) -> None:
    """Whoever raises fails with all its sequences; everyone else gets the token it would get alone."""
    runner = Fragile()
    jobs = [f"job{job}" for job, _ in rows]
    bad = {job for job, token in zip(jobs, (t for _, t in rows), strict=True) if token in {1, 2}}
    batch = [
        Rows([token], [0], [[0]], Draw(Sampling(), 0, 1, [job, token], [])) for job, token in rows
    ]
    ran = run_step(runner, batch, jobs)

    for part, job, outcome in zip(batch, jobs, ran.outcomes, strict=True):
        if job in bad:
            assert isinstance(outcome, Failure)
            assert outcome.message in {"its numbers are not finite", "MemoryError: too large"}
        else:
            assert [outcome] == SimRunner(alpha_s=0, beta_s=0).execute([part])
    assert ran.isolated == bool(bad) or len(set(jobs)) == 1


def test_depth_follows_the_speed() -> None:
    """Depth is what is computed within the deadline; a slower device tells less, but never less than a few jobs."""
    step = LinearCost(0.01, 0.0, 0.0001)
    pace = Pace(Measured(step, 0.001), slo_s=100.0, context=4096)
    assert pace.depth == (100_000 // 32, 100_000)
    record = pace.record(
        WorkerRecord(worker="w", classes=["gpu"], device="cpu", depth_items=0, depth_tokens=0)
    )
    assert (record.depth_tokens, record.alpha_tokens_s) == (100_000, 0.001)
    assert record.beta_s == step.seconds(1, 1)
    for _ in range(500):
        pace.observe(pace.seconds(8, 8), 2 * step.seconds(8, 8))
    assert abs(pace.slowness - 2) < 0.01
    assert abs(pace.depth.tokens - 50_000) < 1000
    assert not pace.moved()  # not so soon after the last time
    slow = Pace(Measured(step, 10.0), slo_s=1.0, context=4096)
    assert slow.depth == (1024, 4 * 4096)
