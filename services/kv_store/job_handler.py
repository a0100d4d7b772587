"""The handler of jobs on sessions from the lane `{sessions/0}:lane:kv`: executes each job and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from functools import partial

from common import log
from common.bus import BusDown, BusFull
from common.errors import DeadlineExceeded, InvalidRequest, SpillwayError
from common.wire.jobs import decode_work
from common.wire.message import BadMessage
from common.wire.results import Event
from common.wire.sessions import SessionResult, SessionWork
from common.worker.leases import Lease
from common.worker.serve_each import LogNames
from common.worker.worker import Worker
from services.kv_store import metrics
from services.kv_store.pages.page_locations import PageLocations
from services.kv_store.sessions.session_store import SessionStore

AT_ONCE = 16
_RETRY_S = 0.5
LOG_NAMES = LogNames("kv_store", "session_job_failed", "store_step_failed")
_log = log.get("kv_store")


class SessionJobHandler:
    """Executes jobs on sessions and on the locations of pages."""

    def __init__(self, store: SessionStore, places: PageLocations) -> None:
        self._store, self._places, self._clock = store, places, store.bus.clock

    async def serve(self, worker: Worker, lease: Lease) -> None:
        """Execute one job and end it."""
        began, op = self._clock.monotonic(), "unknown"
        try:
            work = _understood(lease)
            op = work.op
            worker.leases.spans.of(lease).update_name(f"{op} session")
            body = await self._persist(worker, lease, work)
            logged = len(await self._store.bus.jobs.log(lease.job))
            await worker.outbox.finish(lease, SessionResult(body=body), index=logged)
        except SpillwayError as error:
            await self._refuse(worker, lease, error)
        except Exception as error:  # noqa: BLE001 - a bug in one job must not end the service
            _log.exception("session_job_failed", job=lease.job, op=op)
            with contextlib.suppress(BusDown):
                await worker.outbox.fail(
                    lease, "internal_error", str(error), traceback.format_exc()
                )
        finally:
            metrics.SECONDS.labels(op).observe(self._clock.monotonic() - began)

    async def _persist(self, worker: Worker, lease: Lease, work: SessionWork) -> bytes:
        """Execute a job; while the bus is away or full, repeat it until its deadline: every part is repeatable."""
        while True:
            try:
                if work.op == "places":
                    return await self._places.perform(work)
                return await self._store.perform(work, lease, partial(self._note, worker, lease))
            except (BusDown, BusFull) as error:
                if self._clock.now_ms() + 1000 * _RETRY_S >= lease.deadline_ms:
                    raise DeadlineExceeded(
                        "Redis was away, or full, until the deadline; send the request again"
                    ) from error
                await asyncio.sleep(_RETRY_S)

    async def _note(self, worker: Worker, lease: Lease, data: bytes) -> None:
        """Append progress to the job's own log, which outlives a kill of this process."""
        index = len(await self._store.bus.jobs.log(lease.job))
        event = Event(index=index, kind="progress", data=data)
        await worker.outbox.emit([lease], {lease.job: event})

    async def _refuse(self, worker: Worker, lease: Lease, error: SpillwayError) -> None:
        try:
            logged = len(await self._store.bus.jobs.log(lease.job))
            await worker.outbox.refuse(lease, error, index=logged)
        except BusDown as down:
            _log.warning("result_lost", job=lease.job, error=str(down))


def _understood(lease: Lease) -> SessionWork:
    try:
        work = decode_work(lease.payload)
    except BadMessage as error:
        raise InvalidRequest(str(error), code="bad_message") from error
    if not isinstance(work, SessionWork):
        raise InvalidRequest(
            f"{type(work).__name__} on the lane of sessions; expected work on a session",
            code="bad_message",
        )
    return work
