"""The loop of kv_store: jobs on sessions in from `{sessions/0}:lane:kv`, each in a task of its own, answers out."""

from __future__ import annotations

import asyncio
import contextlib
import time
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
from common.worker.worker import Worker
from services.kv_store import metrics
from services.kv_store.pages.page_locations import PageLocations
from services.kv_store.sessions.session_store import SessionStore

AT_ONCE = 16
_STEP_S = 0.25
_PREDICTED_S = 3.0
_RETRY_S = 0.5
_TOKENS = 1 << 40
_log = log.get("kv_store")


class SessionJobLoop:
    """Serves jobs on sessions until told to stop."""

    def __init__(self, worker: Worker, store: SessionStore, places: PageLocations) -> None:
        self.worker, self._store, self._places = worker, store, places
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then end what runs within `drain_s` and hand over the rest."""
        supervisor = self.worker.bus.supervisor  # it sets `stopping` if one of these ends by itself
        tasks = [
            supervisor.process(self._read(), "read"),
            supervisor.process(self._step(), "step"),
        ]
        await stopping.wait()
        self._stopping = True
        if self._running:
            await asyncio.wait(self._running.values(), timeout=drain_s)
        await supervisor.end(*tasks, *self._running.values())
        with contextlib.suppress(BusDown):
            await self.worker.drain()
            await self.worker.stop()

    async def _read(self) -> None:
        generation = self.worker.generation
        while not self._stopping:
            try:
                leases = await self.worker.reader.read(
                    max(AT_ONCE - len(self._running), 0), _TOKENS
                )
            except BusDown:
                await asyncio.sleep(_RETRY_S)
                continue
            if generation != self.worker.generation:
                generation = self.worker.generation
                for task in self._running.values():
                    task.cancel()  # leases of an incarnation that was given up
            for lease in leases:
                task = asyncio.create_task(self._serve(lease))
                self._running[lease.job] = task
                task.add_done_callback(partial(self._ended, lease))

    def _ended(self, lease: Lease, task: asyncio.Task[None]) -> None:
        if self._running.get(lease.job) is task:
            del self._running[lease.job]
            self.worker.leases.wake()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("session_job_failed", job=lease.job, exc_info=error)
            self.worker.leases.let_go(lease)

    async def _step(self) -> None:
        """Tell the heartbeat that the loop goes on, and stop what was cancelled or fenced off."""
        while True:
            await asyncio.sleep(_STEP_S)
            self.worker.incarnation.working(_PREDICTED_S)
            held = [lease for job, lease in self.worker.leases.held.items() if job in self._running]
            try:
                for job in await self.worker.outbox.emit(held):
                    if job in self._running:
                        self._running[job].cancel()
            except BusDown:
                continue
            except Exception:  # noqa: BLE001 - stepping must outlive a bad reply
                _log.exception("store_step_failed")

    # -- one job ---------------------------------------------------------------------------------------

    async def _serve(self, lease: Lease) -> None:
        began, op = time.monotonic(), "unknown"
        try:
            work = _understood(lease)
            op = work.op
            self.worker.leases.spans.of(lease).update_name(f"{op} session")
            body = await self._persist(lease, work)
            logged = len(await self._store.bus.jobs.log(lease.job))
            await self.worker.outbox.finish(lease, SessionResult(body=body), index=logged)
        except SpillwayError as error:
            await self._refuse(lease, error)
        except Exception as error:  # noqa: BLE001 - a bug in one job must not end the service
            _log.exception("session_job_failed", job=lease.job, op=op)
            with contextlib.suppress(BusDown):
                await self.worker.outbox.fail(
                    lease, "internal_error", str(error), traceback.format_exc()
                )
        finally:
            metrics.SECONDS.labels(op).observe(time.monotonic() - began)

    async def _persist(self, lease: Lease, work: SessionWork) -> bytes:
        """Do a job; while the bus is away, or full, again and again until its deadline: all of it is repeatable."""
        while True:
            try:
                if work.op == "places":
                    return await self._places.perform(work)
                return await self._store.perform(work, lease, partial(self._note, lease))
            except (BusDown, BusFull) as error:
                clock = self._store.bus.clock
                if clock.now_ms() + 1000 * _RETRY_S >= lease.deadline_ms:
                    raise DeadlineExceeded(
                        "Redis was away, or full, until the deadline; send the request again"
                    ) from error
                await asyncio.sleep(_RETRY_S)

    async def _note(self, lease: Lease, data: bytes) -> None:
        """Keep in the job's own log what must outlive a kill."""
        index = len(await self._store.bus.jobs.log(lease.job))
        event = Event(index=index, kind="progress", data=data)
        await self.worker.outbox.emit([lease], {lease.job: event})

    async def _refuse(self, lease: Lease, error: SpillwayError) -> None:
        try:
            logged = len(await self._store.bus.jobs.log(lease.job))
            await self.worker.outbox.refuse(lease, error, index=logged)
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
