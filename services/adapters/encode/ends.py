"""The ends of encode jobs: results and failures written to the bus, and jobs refused."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterable, Sequence

from common import log, tracing
from common.bus import BusDown
from common.errors import DeadlineExceeded, SpillwayError
from common.wire.results import Result
from common.worker.leases import Lease
from common.worker.worker import Worker
from engine.encoder.executor import EncodeFailure, EncodeResult
from services.adapters.encode.job import EncodeJob, result_of

_log = log.get("work")


async def refuse(worker: Worker, lease: Lease, error: SpillwayError) -> None:
    """End a job with an error that another try would repeat."""
    # Without the bus the lease is lost, and another worker gets the job.
    with contextlib.suppress(BusDown):
        await worker.outbox.refuse(lease, error)


async def expire(worker: Worker, jobs: Iterable[EncodeJob]) -> None:
    """End jobs whose deadline passed before their batch."""
    for job in jobs:
        await refuse(worker, job.lease, DeadlineExceeded("the deadline passed in the queue"))


async def end_jobs(
    worker: Worker, jobs: Sequence[EncodeJob], ran: EncodeResult, stopped: set[str]
) -> None:
    """End the jobs of a batch that ran, each with its result or failure, except for jobs that were stopped."""
    outbox, results = worker.outbox, list[tuple[Lease, Result]]()
    for job, outcome in zip(jobs, ran.outcomes, strict=True):
        if job.lease.job in stopped:
            continue
        if isinstance(outcome, EncodeFailure):
            with tracing.use(worker.leases.spans.of(job.lease)):
                why = outcome.message
                _log.error("job_failed", job=job.lease.job, code=outcome.code, why=why)
            await _end(worker, job.lease, outbox.fail(job.lease, *outcome))
        else:
            results.append((job.lease, result_of(job, outcome)))
    try:
        await outbox.finish_all(results)
    except BusDown:
        _log.error("results_lost", jobs=len(results), why="the bus stayed away")
    except Exception:  # noqa: BLE001 - the error is one job's: each is ended by itself
        _log.exception("jobs_not_ended_together", jobs=len(results))
        for lease, result in results:
            if worker.leases.is_held(lease):
                await _end(worker, lease, outbox.finish(lease, result))


async def _end(worker: Worker, lease: Lease, end: Awaitable[str]) -> None:
    try:
        await end
    except BusDown:
        _log.error("result_lost", job=lease.job, why="the bus stayed away")
    except Exception:  # noqa: BLE001 - the error is this job's: the others of the batch go on
        _log.exception("job_not_ended", job=lease.job)
        worker.leases.let_go(lease)
