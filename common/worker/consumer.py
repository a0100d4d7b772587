"""The worker's side of a family: registration, staying alive, recovering what others lost, and leaving in order.

One Consumer is one worker in one family. Its name is an incarnation: when its heartbeat was lost it hands over what it
held, uncharged, and goes on under a new name with `generation` one higher.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Iterable

import msgspec
from redis.exceptions import ResponseError

from common import log, process_identity, tracing
from common.bus import Bus, keys, metrics
from common.bus.connection import BusDown
from common.bus.recovery import Verdict
from common.ids import Family, ulid
from common.redis.heartbeat import TTL_MS, Heartbeat, HeartbeatThread
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.worker.lease_reader import LeaseReader

RECOVER_S = 0.5
BEAT_S = 1.0
REAP_S = 60.0
RECONCILE_S = 2.0
_log = log.get("bus")


class Consumer(LeaseReader):
    """Reads lanes of one family as one worker; all methods belong to one event loop."""

    def __init__(
        self,
        bus: Bus,
        family: Family,
        record: WorkerRecord,
        *,
        heartbeats: HeartbeatThread | None = None,
        largest_items: int = 32,
        largest_tokens: int = 8192,
    ) -> None:
        record = msgspec.structs.replace(record, place=process_identity.here())
        super().__init__(
            bus, family, record, largest_items=largest_items, largest_tokens=largest_tokens
        )
        self.differences = 0
        self.revoked: frozenset[str] = frozenset()
        self._heart, self._supervisor = heartbeats or bus.heartbeats, bus.supervisor
        self._former: list[str] = []
        self._ran = (0, 0, 0, 0, 0.0)
        self.busy_s = 0.0  # of all batches since the start
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    def incarnation(service: str) -> str:
        """Return a new worker name, different at every start."""
        return f"{service}-{socket.gethostname().lower()[:20]}-{os.getpid()}-{ulid()[-10:]}"

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Create the groups, register, and begin to beat, to recover and to reap."""
        metrics.served(self.family, self.record.classes)
        await self._register()
        loops = {
            "turns": self._turns(),
            "beats": self._beats(),
            "recovers": self._recovers(),
            "reconciles": self._reconciles(),
            "reaps": self._reaps(),
        }
        self._tasks = [
            self._supervisor.process(loop, f"{name} {self.family}") for name, loop in loops.items()
        ]

    async def _register(self) -> None:
        await self._beat("start")
        self._heart.add(self._pulse)
        self.bus.workers.forget(self.family)

    async def _beat(self, mode: str) -> list[str]:
        held = list(self._held.values())
        names = [keys.use(self.family), keys.workers(self.family), self._pulse.key]
        lanes = {"start": self.lanes, "stop": self.lanes[:1]}.get(mode, ())
        names += [keys.lane(self.family, cls) for cls in lanes]
        batches, total, items, tokens, seconds = self._ran
        self.record = msgspec.structs.replace(
            self.record,
            batches=batches,
            tokens=total,
            batch_items=items,
            batch_tokens=tokens,
            batch_s=seconds,
        )
        record = encode(self.record)
        args: list[object] = [mode, self.worker, record, TTL_MS, self.lanes[0], len(lanes)]
        args.append(len(held))
        for lease in held:
            names += [keys.job(lease.job), keys.lane(self.family, lease.cls)]
            args += [lease.job, lease.entry, lease.epoch]
        names.append(keys.room(self.family))
        return [item.decode() for item in await self.bus.connection.script("beat", names, args)]

    async def _turns(self) -> None:
        while True:  # a loop that hangs shows no progress to the heartbeat thread
            self._pulse.turn()
            await asyncio.sleep(BEAT_S)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if self._pulse.overdue:
                continue  # as the heartbeat thread: a hung step must lose its leases
            try:
                await self._beat_once()
            except BusDown:
                continue
            except Exception:  # noqa: BLE001 - the loop must outlive a bad reply
                _log.exception("beat_failed", worker=self.worker)

    async def _beat_once(self) -> None:
        pulse = self._pulse
        if not pulse.lost.is_set():
            verdict, *revoked = await self._beat("keep")
            self.revoked = frozenset(revoked)
            if verdict == "gone":
                pulse.lost.set()
        if pulse.lost.is_set():
            await self._reincarnate()
        while self._former:  # until it has succeeded: what was lost to an outage is not charged
            for cls in (keys.own(self._former[0]), *self.record.classes):
                await self._hand_over(cls, self._former[0], None)
            self._former.pop(0)

    async def _reincarnate(self) -> None:
        old = self.worker
        self._heart.remove(self._pulse)
        self._drop_all("lease_lost")
        self._inbox.clear()
        self._former.append(old)
        self.generation += 1
        self.record = msgspec.structs.replace(
            self.record, worker=self.incarnation(old.split("-")[0])
        )
        self._pulse = Heartbeat(keys.heart(self.family, self.worker))
        await self._register()
        _log.warning("worker_reincarnated", was=old, now=self.worker, generation=self.generation)

    async def publish(self, record: WorkerRecord) -> None:
        """Publish new depth and costs; the name stays the incarnation's."""
        self.record = msgspec.structs.replace(record, worker=self.worker, place=self.record.place)
        await self._beat("keep")

    def working(self, predicted_s: float) -> None:
        """Tell the heartbeat thread that a step began which should take `predicted_s`."""
        self._pulse.working(predicted_s)

    def ran(self, items: int, tokens: int, seconds: float) -> None:
        """Note a batch that was run; the next heartbeat tells."""
        batches, total, *_ = self._ran
        self._ran = (batches + 1, total + tokens, items, tokens, seconds)
        self.busy_s += seconds

    def idle(self) -> None:
        """Tell the heartbeat thread that no step is running."""
        self._pulse.idle()

    progressed = idle

    async def _announce_drain(self) -> None:
        await self.publish(msgspec.structs.replace(self.record, draining=True))

    async def stop(self) -> None:
        """Deregister; leases not handed over are reclaimed by others when the heartbeat lapses."""
        self._draining = True
        self.wake()
        await self._supervisor.end(*self._tasks)
        await self._await_reading()
        self._heart.remove(self._pulse)
        try:
            await self._beat("stop")
        except BusDown:
            _log.warning("worker_left_unregistered", worker=self.worker)

    # -- recovery --------------------------------------------------------------------------------------

    async def _recovers(self) -> None:
        turn, last = 0, time.time()
        while True:
            await asyncio.sleep(RECOVER_S)
            turn += 1
            if time.time() - last > TTL_MS / 1000 - 2 * BEAT_S:
                self.bus.connection.suspect()  # this process or the machine stood still: so may others have
            try:
                used = await self.bus.lanes.use(self.family)
                if not any(any(size) for size in used.values()):
                    self._want_take = False
                    self._hush(quiet=False)
                    continue
                await self._settle(used)
                await self._take()
                if turn % 2 == 0:
                    await self._adopt(used)
            except BusDown:
                pass
            except ResponseError as error:
                if "NOGROUP" not in str(error):  # else Redis was emptied: the next beat begins anew
                    _log.exception("recovery_failed", worker=self.worker)
            except Exception:  # noqa: BLE001 - recovery must outlive a bad reply
                _log.exception("recovery_failed", worker=self.worker)
            finally:
                last = time.time()

    async def _settle(self, used: Iterable[str]) -> None:
        for cls in self.record.classes:
            for done in await self.bus.recovery.settle(self.family, cls, self.worker):
                self._settled(cls, done)
        for cls in used:
            if cls.startswith("w.") and cls != self.lanes[0]:
                shared = self.record.classes[0]
                for done in await self.bus.recovery.settle_own_lane(
                    self.family, cls[2:], self.worker, shared
                ):
                    self._settled(shared, done)

    def _settled(self, cls: str, done: Verdict) -> None:
        entry = done.entry
        if done.verdict == "not" or entry.holder in {"", keys.RETURNED}:
            return
        with tracing.use(tracing.remote(entry.traceparent)):
            _log.warning("lease_settled", job=entry.job, verdict=done.verdict)
        self.spans.lost(cls, entry)
        metrics.LEASES_LOST.labels(metrics.lane_label(self.family, cls)).inc()

    async def _reconciles(self) -> None:
        while True:
            await asyncio.sleep(RECONCILE_S)
            try:
                await self._reconcile()
            except (BusDown, ResponseError):
                continue
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("reconcile_failed", worker=self.worker)

    async def _reaps(self) -> None:
        while True:
            await asyncio.sleep(REAP_S * random.uniform(0.5, 1.5))
            try:
                await self.reap()
            except BusDown:
                continue
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("reap_failed", worker=self.worker)

    async def reap(self) -> None:
        """Housekeep the family once; differences of use are bugs and are counted."""
        ended, _, wrong = await self.bus.recovery.reap(self.family, self.record.classes)
        metrics.ended(self.family, self.record.classes[0], "expired", ended)
        self.differences += len(wrong)
        for line in wrong:
            _log.error("use_differed", family=str(self.family), lane=line)
            metrics.USE_DIFFERENCES.inc()
