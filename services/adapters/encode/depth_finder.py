"""The depth finder: finds a worker's depth in queries by probes through the mesh, for policies that admit by queries.

Meanwhile the worker serves only its own lane. The depth is stored in Redis and used again while device, model,
precision, cores and objective are the same.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping

import msgspec

from common import log
from common.bus import Bus, NewJob, Notifications, keys
from common.bus.admission import Terms
from common.config import WorkerConfig
from common.cost.estimate import MOST, estimate, tune, tune_beside
from common.cost.linear import PARCEL_ITEMS, QUERY_TOKENS
from common.ids import Family, job_id, ulid
from common.registry.measured_depths import MeasuredDepths
from common.tasks import stop_or_end
from common.wire.jobs import EmbedWork
from common.wire.message import encode
from common.wire.registry import DepthRecord, WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from engine.encoder.capacity import EncoderCapacity
from engine.encoder.model import EncoderModel
from services.adapters.encode.loop import with_capacity

_PROBE_S = 300.0
# The longest waits of an overflow worker for an accelerator's worker to appear, and then for the end of its probes.
_APPEAR_S, _OPEN_S = 5.0, 600.0
_log = log.get("work")


def counts_queries(config: WorkerConfig) -> bool:
    """Return whether admission counts queries, so that workers must find their depths in queries."""
    return config.admission != "windve-tokens"


class Prober:
    """Sends queries to workers' own lanes, all at the same time, and measures the seconds until the last answer."""

    def __init__(self, bus: Bus, family: Family, model: EncoderModel) -> None:
        self._bus, self._family, self._model = bus, family, model
        self._journal = Notifications(bus.connection, incarnation_name("probe"))

    async def close(self) -> None:
        """End the subscription to the answers."""
        await self._journal.stop()

    async def probe(self, queries: Mapping[str, int]) -> dict[str, float]:
        """Return by worker the seconds until its last query was answered; infinite if its queries were refused."""
        workers = [worker for worker, count in queries.items() if count]
        took = await asyncio.gather(*(self._one(worker, queries[worker]) for worker in workers))
        return dict.fromkeys(queries, 0.0) | dict(zip(workers, took, strict=True))

    async def _one(self, worker: str, count: int) -> float:
        jobs, bus = [self._job(first, count) for first in range(0, count, PARCEL_ITEMS)], self._bus
        bells = [self._journal.bell(job.id, self._family) for job in jobs]
        await bus.workers.living(self._family)  # a router in use knows the workers already, too
        began_s = bus.clock.monotonic()
        deadline_ms = bus.clock.now_ms() + int(1000 * _PROBE_S)
        try:
            admission = await bus.admission.admit(
                jobs,
                classes=(keys.own(worker),),
                router=self._journal.router,
                tenant="",
                deadline_ms=deadline_ms,
                terms=Terms("all"),
                own=True,
            )
            if admission.outcome != "admitted":
                return math.inf
            ends = [
                self._journal.end(job.id, deadline_ms, bell)
                for job, bell in zip(jobs, bells, strict=True)
            ]
            events = await asyncio.gather(*ends)
        finally:
            for bell in bells:
                bell.close()
        took_s = bus.clock.monotonic() - began_s
        for job in jobs:
            await bus.jobs.expire(job.id, 1.0)
        return took_s if all(event.kind == "result" for event in events) else math.inf

    def _job(self, first: int, count: int) -> NewJob:
        length = min(QUERY_TOKENS, self._model.max_tokens)
        rows = [
            [2 + (i * 31 + j * 7) % 97 for j in range(length)]
            for i in range(first, min(first + PARCEL_ITEMS, count))
        ]
        work = encode(EmbedWork(fingerprint=self._model.fingerprint, tokens=rows))
        name = job_id(self._family, ulid(self._bus.clock.now_ms()))
        return NewJob(name, work, len(rows), length * len(rows))


class DepthFinder:
    """Finds one worker's depth: reads a stored one, else probes; an overflow worker also beside the accelerator."""

    def __init__(
        self, bus: Bus, worker: Worker, model: EncoderModel, capacity: EncoderCapacity
    ) -> None:
        self._bus, self._worker, self._model, self._capacity = bus, worker, model, capacity

    async def find(self, stopping: asyncio.Event) -> None:
        """Find the depth, publish it, and open the worker to all lanes."""
        depths, name = MeasuredDepths(self._bus, self._worker.family), self._name()
        known = await depths.get(name)
        if known is not None:
            found = known
        else:
            task = asyncio.ensure_future(self._probe())
            await stop_or_end(stopping, task)
            if not task.done():
                task.cancel()
                return
            found = task.result()
            await depths.put(name, found)
        self._capacity.queries = found.depth
        record = msgspec.structs.replace(
            with_capacity(self._worker.record, self._capacity), closed=False
        )
        await self._worker.incarnation.publish(record)
        line = {k: getattr(found, k) for k in ("alpha_s", "beta_s", "r2", "by_line", "depth")}
        _log.info("depth_found", probed=known is None, **line)

    def _name(self) -> str:
        """Return the name of the depth's record, made of the conditions under which the depth holds."""
        model, cores = self._model, len(os.sched_getaffinity(0))
        known = model.known_cost and ",".join(f"{part:g}" for part in model.known_cost)
        parts = (self._worker.record.classes[0], model.device, model.dtype, cores, known or "")
        return " ".join(map(str, (*parts, model.fingerprint, f"{self._capacity.slo_s:g}s")))

    async def _probe(self) -> DepthRecord:
        family, me, slo_s = self._worker.family, self._worker.name, self._capacity.slo_s
        accelerator = await self._accelerator() if self._worker.record.classes[0] == "cpu" else None
        prober = Prober(self._bus, family, self._model)

        async def alone(queries: int) -> float:
            return (await prober.probe({me: queries}))[me]

        async def device(queries: int) -> float:
            """Return probe seconds of the device alone, since the open-loop depth counts the hops separately."""
            before_s = self._worker.incarnation.busy_s
            answered = await alone(queries)
            return min(answered, self._worker.incarnation.busy_s - before_s)

        async def both(there: int, here: int) -> tuple[float, float]:
            assert accelerator is not None
            took = await prober.probe({accelerator.worker: there, me: here})
            return took[accelerator.worker], took[me]

        try:
            line = await estimate(device, slo_s)
            depth = await tune(alone, slo_s, line.depth) if line.depth else 0
            if accelerator is not None and depth:
                depth = await tune_beside(both, slo_s, accelerator.depth_queries, depth, most=MOST)
        finally:
            await prober.close()
        return DepthRecord(
            alpha_s=line.alpha_s,
            beta_s=line.beta_s,
            r2=line.r2,
            slo_s=slo_s,
            by_line=line.depth,
            depth=depth,
            points=list(line.points),
            at_ms=self._bus.clock.now_ms(),
        )

    async def _accelerator(self) -> WorkerRecord | None:
        """Wait for the accelerator's worker to find its own depth; return that worker, or None if there is none."""
        clock = self._bus.clock
        appear, give_up = clock.monotonic() + _APPEAR_S, clock.monotonic() + _OPEN_S
        while clock.monotonic() < give_up:
            workers = await self._bus.workers.living(self._worker.family)
            found = [w for w in workers if "gpu" in w.classes and not w.draining]
            if found and not found[0].closed:
                return found[0]
            if not found and clock.monotonic() > appear:
                return None
            await asyncio.sleep(0.5)
        return None
