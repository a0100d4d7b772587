"""Run one step on the compute thread: together, or, where that raises, each job alone, so that only the guilty fail."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from engine.decoder.executor.interface import (
    Executor,
    PageLoads,
    SampledToken,
    SequenceInput,
    StepFailed,
)


class StepFailure(NamedTuple):
    """A job whose own rows raised, or gave values that are not numbers."""

    code: str
    message: str
    trace: str


class StepResult(NamedTuple):
    """Outcomes in the order of the rows, the seconds the device took, and whether jobs were run apart."""

    outcomes: list[SampledToken | StepFailure | None]
    seconds: float
    isolated: bool


def run_step(
    runner: Executor,
    rows: Sequence[SequenceInput],
    jobs: Sequence[str],
    loading: PageLoads | None = None,
) -> StepResult:
    """Execute `rows` on the calling thread; `jobs` names the job of each. Raises nothing a job can cause.

    Returns when all that is being loaded has come, too.

    Writing a page's keys and values again changes nothing, so what failed together is simply run again.
    """
    started = time.perf_counter()
    outcomes: list[SampledToken | StepFailure | None] = [None] * len(rows)
    batches, isolated = [list(range(len(rows)))] if rows else [], False
    while batches:
        batch = batches.pop()
        try:
            drawn = runner.execute([rows[index] for index in batch], loading)
        except StepFailed as error:
            guilty = jobs[batch[error.index]]
            failure = failure_of(error)
            rest = [index for index in batch if jobs[index] != guilty]
        except Exception as error:  # noqa: BLE001 - whatever a model raises is its jobs' failure, not the worker's
            names = dict.fromkeys(jobs[index] for index in batch)
            if len(names) > 1:
                batches += [[i for i in batch if jobs[i] == name] for name in reversed(names)]
                isolated = True
                continue
            guilty, failure, rest = jobs[batch[0]], failure_of(error), []
        else:
            for index, outcome in zip(batch, drawn, strict=True):
                outcomes[index] = outcome
            continue
        isolated = True
        for index, job in enumerate(jobs):
            if job == guilty:
                outcomes[index] = failure
        if rest:
            batches.append(rest)
    if loading is not None:
        loading.wait()
    return StepResult(outcomes, time.perf_counter() - started, isolated)


def failure_of(error: Exception, code: str = "model_error") -> StepFailure:
    """Return what a job is charged with for an error being handled."""
    message = str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
    return StepFailure(code, message, traceback.format_exc())
