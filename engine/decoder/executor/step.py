"""Steps on a device: submit and execute a step; if that raises, execute each request alone to find the faulty one."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from common.clock import SYSTEM, Clock
from engine.decoder.executor.interface import (
    EarlyEnd,
    Executor,
    HomeMoves,
    PageLoads,
    SampledToken,
    SequenceInput,
    StagedExecutor,
    StageTime,
    StepFailed,
)
from engine.device import DeviceQueue

KIND = "generate"  # the kind of these tasks in the device's queue


class StepFailure(NamedTuple):
    """The error of a request whose own rows raised, or computed values that are not finite."""

    code: str
    message: str
    trace: str


class StepResult(NamedTuple):
    """The result of a step: outcomes in the order of the rows, the device's seconds, whether requests ran alone.

    `tokens` is the number of tokens that each sequence got, one after another (see `SequenceInput.ahead`). `stages` are
    the timed stages of a step that was executed in stages.
    """

    outcomes: list[SampledToken | StepFailure | None]
    seconds: float
    isolated: bool
    tokens: int = 1
    stages: Sequence[StageTime] = ()


Compute = Callable[[Sequence[SequenceInput]], Sequence[SampledToken | None]]


class StagedStep(NamedTuple):
    """The arguments of a step in stages: the executor, and the pages that change their home."""

    executor: StagedExecutor
    moves: HomeMoves


class StepHandle:
    """A submitted step; a caller that is cancelled while it waits does not stop the step."""

    def __init__(self, device: DeviceQueue) -> None:
        self._device = device
        self.early = EarlyEnd()
        self.future: asyncio.Future[StepResult] | None = None
        self.outcomes: Sequence[
            SampledToken | StepFailure | None
        ] = ()  # set on the device's thread

    async def result(self) -> StepResult:
        """Return the step's result once the device has executed it."""
        assert self.future is not None
        return await asyncio.shield(self.future)

    def revoke(self) -> bool:
        """Take the step back; False if the step has begun or is over."""
        return self.future is not None and self._device.revoke(self.future)


class Following(NamedTuple):
    """The preceding step of a step, and for each row of the later step the row whose drawn token it computes."""

    step: StepHandle
    rows: Sequence[int]


class StepQueue:
    """Submits the steps of one executor to its device, which executes them in the order of submission."""

    def __init__(self, executor: Executor, device: DeviceQueue, clock: Clock = SYSTEM) -> None:
        self._executor, self._device, self._clock = executor, device, clock

    def submit(
        self,
        rows: Sequence[SequenceInput],
        requests: Sequence[str],
        loading: PageLoads | None = None,
        predicted_s: float = 0.0,
        following: Following | None = None,
        staged: StagedStep | None = None,
    ) -> StepHandle:
        """Queue a step on the device and return at once.

        A step consists of each sequence's rows, the request of each sequence, and the page loads that the rows wait
        for. A step may be submitted while the preceding step runs (`following`): its rows then get the tokens drawn
        there. A `staged` step is executed in stages.
        """
        handle = StepHandle(self._device)
        compute: Compute = partial(self._executor.execute, loading=loading, early=handle.early)
        if staged is not None:
            # A step that is executed again for some of its rows gets the same moves, which are done only once.
            compute = partial(staged.executor.execute_staged, loading=loading, moves=staged.moves)

        def run() -> StepResult:
            given = _followed(rows, following)
            bare = staged is not None
            result = run_step(compute, given, requests, loading, self._clock, bare=bare)
            handle.outcomes = result.outcomes
            if staged is not None:
                return result._replace(stages=list(staged.executor.stage_times))
            return result

        handle.future = self._device.submit(run, kind=KIND, predicted_s=predicted_s)
        return handle


def _followed(
    rows: Sequence[SequenceInput], following: Following | None
) -> Sequence[SequenceInput | None]:
    """Return rows with the tokens drawn by the preceding step; None for a row whose sequence got no token."""
    if following is None:
        return rows
    given: list[SequenceInput | None] = []
    for row, before in zip(rows, following.rows, strict=True):
        drawn = following.step.outcomes[before] if following.step.outcomes else None
        if not isinstance(drawn, SampledToken) or row.sample is None:
            given.append(None)
            continue
        tokens = [drawn.token, *(each.token for each in drawn.then)]
        draws = [draw._replace(output=[*draw.output, *tokens]) for draw in (row.sample, *row.ahead)]
        given.append(row._replace(tokens=tokens[-1:], sample=draws[0], ahead=draws[1:]))
    return given


def run_step(
    compute: Compute,
    rows: Sequence[SequenceInput | None],
    requests: Sequence[str],
    loading: PageLoads | None = None,
    clock: Clock = SYSTEM,
    *,
    bare: bool = False,
) -> StepResult:
    """Compute `rows`, whose requests are `requests`, on the calling thread; a request's error becomes its outcome.

    A row that is None is not computed, and its outcome is None. A `bare` step is executed even without rows, since it
    copies pages.

    Rows that failed together are executed again one request at a time; this is safe, since the same keys and values are
    written again. Returns once all pages of `loading` have arrived.
    """
    started = clock.perf_s()
    outcomes: list[SampledToken | StepFailure | None] = [None] * len(rows)
    given = {index: row for index, row in enumerate(rows) if row is not None}
    batches, isolated = [list(given)] if given or bare else [], False
    while batches:
        batch = batches.pop()
        try:
            drawn = compute([given[index] for index in batch])
        except Exception as error:  # noqa: BLE001 - an error of the model fails its requests, not the worker
            isolated, names = True, [requests[index] for index in batch]
            guilty = _guilty(error, names)
            if guilty is None:
                alone = [[i for i in batch if requests[i] == name] for name in dict.fromkeys(names)]
                batches += reversed(alone)
                continue
            failure = failure_of(error)
            for index, request in enumerate(requests):
                if request == guilty:
                    outcomes[index] = failure
            if rest := [index for index in batch if requests[index] != guilty]:
                batches.append(rest)
        else:
            for index, outcome in zip(batch, drawn, strict=True):
                outcomes[index] = outcome
    if loading is not None:
        loading.wait()
    tokens = max((_drawn(row, got) for row, got in zip(rows, outcomes, strict=True)), default=1)
    return StepResult(outcomes, clock.perf_s() - started, isolated, tokens)


def _drawn(row: SequenceInput | None, outcome: SampledToken | StepFailure | None) -> int:
    """Return the number of tokens drawn one after another for a row."""
    several = row is not None and row.ahead and isinstance(outcome, SampledToken)
    return 1 + len(outcome.then) if several and isinstance(outcome, SampledToken) else 1


def _guilty(error: Exception, requests: Sequence[str]) -> str | None:
    """Return the request that caused a batch's error; None if several may have caused it."""
    if isinstance(error, StepFailed):
        return requests[error.index]
    return requests[0] if len(set(requests)) == 1 else None


def failure_of(error: Exception, code: str = "model_error") -> StepFailure:
    """Return the failure to charge a request with, for the error being handled."""
    if isinstance(error, StepFailed):
        return StepFailure(error.code, str(error), traceback.format_exc())
    return StepFailure(code, f"{type(error).__name__}: {error}", traceback.format_exc())
