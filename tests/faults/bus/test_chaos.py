"""Random interleavings of routers, workers, crashes, zombies, clock steps and outages against the model's rules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.bus import BusDown, Notifications, keys
from common.bus.keys import own
from common.errors import DeadlineExceeded, InvalidRequest
from common.registry.dead_letters import DeadLetters
from common.registry.sessions import Sessions
from common.wire.results import Event
from common.worker.leases import Lease
from tests.conftest import PROFILE
from tests.support.bus import RESULT, Hand, new_job
from tests.support.bus_chaos import Act, Chaos, Ear, Violation
from tests.support.servers import KINDS, Server

JUDGED_EVERY = 200
STEPS = 20_000 if PROFILE == "soak" else 500
HOUR_MS = 3_600_000


class Driver(Chaos):
    """All steps the actors of a mesh may take."""

    def worker(self) -> Hand | None:
        """A living worker that may take more."""
        free = [w for w in self.workers if not any(x.alone for x in w.held.values())]
        return self.random.choice(free) if free else None

    def holder(self) -> Hand | None:
        """A living worker that holds something."""
        busy = [w for w in self.workers if w.held]
        return self.random.choice(busy) if busy else None

    def lease_of(self, hand: Hand) -> Lease:
        """One of its leases."""
        return self.random.choice(list(hand.held.values()))

    def redis_ms(self) -> int:
        """The server's time."""
        seconds, micros = self.raw.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def admit(self, hurt: str) -> None:
        """A router admits 1 to 3 jobs, some of them about to expire."""
        r, number = self.random, self.random.randrange(2)
        near = r.random() < 0.06
        jobs = [
            new_job(self.family, r.randint(1, 3), r.randint(1, 30)) for _ in range(r.randint(1, 3))
        ]
        deadline = self.redis_ms() + (40 if near else HOUR_MS)
        classes = r.choice([("gpu", "cpu"), ("gpu",), ("cpu",)])
        prefer = r.choice(self.workers).worker if self.workers and r.random() < 0.3 else None
        session = await self.turns.choose(self.buses[number]) if r.random() < 0.3 else None
        turn: dict[str, Any] = {}
        if session is not None:
            jobs = jobs[:1]
            self.turns.admitted(jobs[0].id, session)
            turn = {"session": session.id, "version": session.version}
        ids = {job.id for job in jobs}
        self.live |= ids
        self.poison |= {job for job in ids if r.random() < 0.1}
        self.deadly |= {job for job in ids if r.random() < 0.1}
        self.near |= ids if near else set()
        got: list[Any] = []
        again = r.random() < 0.1
        bus, router = self.buses[number], self.journals[number].router

        async def run() -> None:
            options = {"router": router, "tenant": "t", "deadline_ms": deadline, "prefer": prefer}
            options |= turn
            while len(got) < (2 if again else 1):
                got.append(await bus.admission.admit(jobs, classes=classes, **options))  # type: ignore[arg-type]

        await self.step(Act("admit"), run, hurt=hurt)
        first = got[0]
        if any(h > d for h, d in zip(first.held, first.depth, strict=True)):
            raise Violation(f"admitted beyond depth: {first}")
        if len(got) == 2 and first.outcome != "refused" and got[1].outcome != "exists":
            raise Violation(f"admitted twice: {got}")
        if got[-1].outcome == "refused":
            if any([await bus.jobs.get(job) for job in ids]):
                raise Violation(f"refused, and yet there: {got}")
            self.live -= ids
            return
        for job in ids:
            if r.random() < 0.3:
                self.ears[job] = Ear(job)
                self.listen(self.ears[job], number)
        if near:
            await asyncio.sleep(0.045)

    def listen(self, ear: Ear, number: int) -> None:
        """Let router `number` read a job's events from where the last one stopped."""
        journal = self.journals[number]

        async def read() -> None:
            start = len(ear.seen)
            async for event in journal.events(ear.job, start, self.redis_ms() + 20 * HOUR_MS):
                ear.seen.append(event)

        ear.task = asyncio.create_task(read())

    async def router_dies(self, hurt: str) -> None:
        """A router dies; another adopts its jobs and resumes their events."""
        number = self.random.randrange(2)
        old = self.journals[number]
        await old.stop()
        self.names += 1
        self.journals[number] = Notifications(
            self.buses[number].connection, f"r{number}.{self.names}"
        )
        for ear in self.ears.values():
            if ear.task is not None and not ear.task.done() and self.random.random() < 0.5:
                ear.task.cancel()
                await asyncio.gather(ear.task, return_exceptions=True)
                await self.buses[number].jobs.adopt(ear.job, self.journals[number].router)
                self.listen(ear, number)

    async def join(self, hurt: str) -> None:
        """A worker starts."""
        if len(self.workers) >= 4:
            return
        self.names += 1
        classes = self.random.choice([("gpu",), ("cpu",), ("gpu", "cpu")])
        bus = self.random.choice(self.buses[2:])
        depth = {"items": self.random.randint(5, 15), "tokens": self.random.randint(50, 200)}
        hand = Hand(bus, self.family, f"w-{self.names}", *classes, **depth)
        self.workers.append(hand)
        await self.step(Act("join"), hand.join, hurt=hurt)

    async def pull(self, hurt: str) -> None:
        """A worker reads one of its lanes."""
        if (hand := self.worker()) is not None:
            cls = self.random.choice([own(hand.worker), *hand.record.classes])
            count = self.random.randint(1, 4)
            await self.step(Act("pull", hand.worker), lambda: hand.pull(count, cls), hurt=hurt)

    async def take(self, hurt: str) -> None:
        """A worker takes what was handed over; a job with two suspicions only when idle, and then alone."""
        if (hand := self.worker()) is None:
            return
        cls, idle = self.random.choice([own(hand.worker), *hand.record.classes]), not hand.held
        await self.step(Act("take", hand.worker), lambda: hand.take(4, cls, idle=idle), hurt=hurt)
        alone = [x for x in hand.held.values() if x.alone]
        if alone and len(hand.held) > 1:
            # The reader of the real worker gives back what came with it; the script takes one only.
            raise Violation(f"taken alone, among {len(hand.held)}")

    def partial(self, lease: Lease) -> Any:
        """What a cancelled job's session is to keep of its turn."""
        return self.turns.partial(lease.job)

    async def delete_session(self, hurt: str) -> None:
        """A session is deleted, and another begun."""
        bus, turns = self.buses[0], self.turns
        if len(turns.open) >= 3:
            name = self.random.choice(turns.open)
            turns.open.remove(name)
            turns.deleted.add(name)
            await self.step(Act("delete_session"), lambda: Sessions(bus).mark_deleted(name))
        await turns.create(bus)

    async def emit(self, hurt: str) -> None:
        """A worker's step, sometimes with an event the log does not expect."""
        if (hand := self.holder()) is None:
            return
        leases = self.random.sample(
            list(hand.held.values()), self.random.randint(1, len(hand.held))
        )
        events, wrong = {}, self.random.random() < 0.1
        for lease in leases:
            length = len(await hand.bus.jobs.log(lease.job))
            data = self.random.randbytes(self.random.choice([3, 300, 5000]))
            events[lease.job] = Event(index=length + wrong, kind="progress", data=data)
        act = Act("emit", hand.worker, frozenset(events), emits=True, fails=wrong)
        await self.step(act, lambda: hand.step(leases, events, partial=self.partial), hurt=hurt)

    async def end(self, hurt: str) -> None:
        """A worker ends a job: result, error, failure, or an expiry its clock wrongly sees."""
        if (hand := self.holder()) is None:
            return
        lease = self.lease_of(hand)
        kind = self.random.choice(["result", "result", "error", "fail", "early"])
        kind = "fail" if lease.job in self.poison else kind
        turn = self.turns.end_of(lease.job)
        runs: dict[str, Any] = {
            "result": lambda: hand.finish(lease, RESULT, **turn),
            "error": lambda: hand.refuse(lease, InvalidRequest("no"), **turn),
            "fail": lambda: hand.fail(lease, "model_error", "no"),
            "early": lambda: hand.refuse(lease, DeadlineExceeded("late")),
        }
        act = Act(
            kind,
            hand.worker,
            frozenset({lease.job}),
            fails=kind == "fail",
            ends=frozenset({kind}),
        )
        await self.step(act, runs[kind], hurt=hurt)

    async def give_back(self, hurt: str) -> None:
        """A worker hands over some leases, and tries to use one of them later."""
        if (hand := self.holder()) is None:
            return
        lease = self.lease_of(hand)
        await self.step(Act("give_back"), lambda: hand.give_back([lease]), hurt=hurt)
        if lease.job not in hand.held and not hurt:
            act, turn = Act("stale"), self.turns.end_of(lease.job)
            await self.step(act, lambda: hand.finish(lease, RESULT, **turn))

    async def die(self, hurt: str) -> None:
        """A worker is killed, or stops for long: it may come back as a zombie."""
        if not self.workers:
            return
        doomed = [w for w in self.workers if self.deadly & set(w.held)]
        hand = self.random.choice(doomed or self.workers)
        self.workers.remove(hand)
        self.zombies.append((hand, list(hand.held.values())))
        await self.step(Act("die"), hand.die, hurt=hurt)
        self.raw.delete(keys.heart(self.family, hand.worker))

    async def zombie(self, hurt: str) -> None:
        """A zombie acts: heard only while nobody has settled its leases."""
        acting = [(hand, leases) for hand, leases in self.zombies if leases]
        if not acting:
            return
        hand, leases = self.random.choice(acting)
        lease = self.random.choice(leases)
        kind = self.random.choice(["result", "fail", "emit"])
        event = Event(index=len(await hand.bus.jobs.log(lease.job)), kind="progress")
        runs: dict[str, Any] = {
            "result": lambda: hand.finish(lease, RESULT, **self.turns.end_of(lease.job)),
            "fail": lambda: hand.fail(lease, "x", "y"),
            "emit": lambda: hand.step([lease], {lease.job: event}),
        }
        act = Act(
            f"zombie_{kind}",
            lease.worker,
            frozenset({lease.job}),
            emits=kind == "emit",
            fails=kind == "fail",
            ends=frozenset({kind}),
        )
        await self.step(act, runs[kind], hurt=hurt)

    async def revive(self, hurt: str) -> None:
        """A stopped worker goes on: it finds its heartbeat gone and begins anew, uncharged."""
        if not self.zombies or len(self.workers) >= 4:
            return
        hand, _ = self.random.choice(self.zombies)
        if hand in self.workers:
            return
        generation = hand.generation
        await self.step(Act("revive"), hand.revive, hurt=hurt)
        if hand.generation > generation:
            self.workers.append(hand)
            self.raw.set(keys.heart(self.family, hand.worker), 1, px=HOUR_MS)

    async def leave(self, hurt: str) -> None:
        """A worker drains and stops."""
        if len(self.workers) < 2:
            return
        hand = self.random.choice(self.workers)

        async def run() -> None:
            await hand.drain()
            await hand.stop()

        await self.step(Act("leave"), run, hurt=hurt)
        self.workers.remove(hand)
        self.raw.delete(keys.heart(self.family, hand.worker))

    async def settle(self, hurt: str) -> None:
        """A living worker settles the dead, on shared lanes and on their own."""
        if (hand := self.worker()) is None:
            return

        async def run() -> None:
            await hand.settle()
            for cls in await hand.bus.lanes.use(self.family):
                if cls.startswith("w.") and cls != own(hand.worker):
                    shared = hand.record.classes[0]
                    await hand.bus.recovery.settle_own_lane(
                        self.family, cls[2:], hand.worker, shared
                    )

        await self.step(Act("settle", settles=True), run, hurt=hurt)

    async def move(self, hurt: str) -> None:
        """An idle worker moves unread entries between lanes."""
        if (hand := self.worker()) is not None:
            target = hand.record.classes[0]
            source = "cpu" if target == "gpu" else "gpu"
            run = lambda: hand.bus.recovery.move(self.family, source, target, hand.worker)  # noqa: E731
            await self.step(Act("move"), run, hurt=hurt)

    async def reap(self, hurt: str) -> None:
        """The reaper runs and must find no difference."""
        got: list[Any] = []

        async def run() -> None:
            got.append(await self.buses[2].recovery.reap(self.family, ("gpu", "cpu")))

        await self.step(Act("reap"), run, hurt=hurt)
        if got and got[0][2]:
            raise Violation(f"use differed: {got[0][2]}")

    async def cancel(self, hurt: str) -> None:
        """A router cancels a job."""
        if self.live:
            job = self.random.choice(sorted(self.live))
            self.cancelled.add(job)
            await self.step(Act("cancel"), lambda: self.buses[0].control.cancel(job), hurt=hurt)

    async def storm(self, hurt: str) -> None:
        """Several workers settle, take, move, reap and reconcile at the same moment."""
        hands = [hand for _ in range(4) if (hand := self.worker()) is not None]

        async def one(hand: Hand) -> None:
            cls, other = self.random.sample(["gpu", "cpu"], 2)
            ops: list[Callable[[], Awaitable[Any]]] = [
                hand.settle,
                hand.reconcile,
                lambda: hand.take(2, self.random.choice(hand.record.classes)),
                lambda: hand.bus.recovery.move(self.family, other, cls, hand.worker),
                lambda: hand.bus.recovery.reap(self.family, ("gpu", "cpu")),
            ]
            for op in self.random.sample(ops, 3):
                reply = await op()
                if isinstance(reply, tuple) and reply[2]:
                    raise Violation(f"use differed: {reply}")

        async def run() -> None:
            done = await asyncio.gather(*map(one, hands), return_exceptions=True)
            for error in done:
                if isinstance(error, BaseException) and not isinstance(error, BusDown):
                    raise error

        await self.step(Act("storm", settles=True), run, hurt=hurt)

    async def reconcile(self, hurt: str) -> None:
        """A worker looks for deliveries it never got."""
        for hand in self.workers:
            await self.step(Act("reconcile"), hand.reconcile, hurt=hurt)

    async def clock(self, hurt: str) -> None:
        """A process' clock is off by up to an hour, either way."""
        bus = self.random.choice(self.buses)
        bus.clock.offset_ms += self.random.uniform(-1, 1) * HOUR_MS

    async def forget(self, hurt: str) -> None:
        """The server forgets the scripts."""
        self.raw.script_flush()

    async def run(self, steps: int) -> None:
        """Take so many random steps, then let one healthy worker finish everything."""
        weights = {
            self.admit: 20,
            self.pull: 16,
            self.take: 12,
            self.emit: 10,
            self.end: 14,
            self.give_back: 3,
            self.die: 6,
            self.zombie: 5,
            self.revive: 2,
            self.leave: 1,
            self.join: 8,
            self.settle: 5,
            self.move: 3,
            self.reap: 2,
            self.storm: 4,
            self.cancel: 2,
            self.reconcile: 2,
            self.clock: 1,
            self.forget: 0.2,
            self.router_dies: 1,
            self.delete_session: 1,
        }
        for _ in range(3):
            await self.turns.create(self.buses[0])
        choices, shares = list(weights), list(weights.values())
        for step in range(steps):
            if step % JUDGED_EVERY == 0:
                await self.judge(
                    [ear for ear in self.ears.values() if ear.task and ear.task.done()]
                )
            (op,) = self.random.choices(choices, shares)
            dice = self.random.random()
            await op("kill" if dice < 0.004 else "cut" if dice < 0.05 else "")
        await self.finish_all()

    async def judge(self, ears: list[Ear]) -> None:
        """What each of these has heard, to the end, is what was logged. A log is kept for ten minutes."""
        for ear in ears:
            assert ear.task is not None
            await asyncio.wait_for(ear.task, 60)
            logged = await self.buses[0].jobs.log(ear.job)
            if ear.seen != logged:
                raise Violation(f"{ear.job}: heard {ear.seen}, logged {logged}")
            del self.ears[ear.job]

    async def finish_all(self) -> None:
        """Let a healthy worker finish what is left; everything must end, and every ear have heard all."""
        last = await Hand(self.buses[2], self.family, "w-last", "gpu", "cpu").join()
        self.workers = [*self.workers, last]
        for name in (w.worker for w in self.workers[:-1]):
            self.raw.delete(keys.heart(self.family, name))
        self.workers = [last]
        for _ in range(60):
            if not self.live:
                break
            await self.settle("")
            for cls in ("gpu", "cpu"):
                idle = not last.held
                await self.step(Act("take"), partial(last.take, 20, cls, idle=idle))
                if not any(x.alone for x in last.held.values()):
                    await self.step(Act("pull"), partial(last.pull, 20, cls))
                for lease in list(last.held.values()):
                    jobs = frozenset({lease.job})
                    act = Act("result", last.worker, jobs, ends=frozenset({"result"}))
                    end, turn = last.finish, self.turns.end_of(lease.job)
                    await self.step(act, partial(end, lease, RESULT, **turn))
        if self.live:
            raise Violation(f"never ended: {self.live}")
        await self.judge(list(self.ears.values()))
        await self.reap("")
        used = await self.buses[0].lanes.use(self.family)
        if any(value != (0, 0) for value in used.values()):
            raise Violation(f"all is over, and yet in use: {used}")
        letters = await DeadLetters(self.buses[0]).all(self.family)
        if len(letters) != self.counts.get("dead", 0):
            raise Violation(f"{self.counts.get('dead')} convicted, {len(letters)} dead letters")


@pytest.mark.timeout(36_000 if PROFILE == "soak" else 110)
@pytest.mark.parametrize("redis_server", KINDS if PROFILE == "soak" else ("valkey",), indirect=True)
async def test_chaos(redis_server: Server, tmp_path: Path, seed: int) -> None:
    """Whatever happens in whatever order, no step changes what it may not, and everything accepted ends once."""
    driver = Driver(redis_server, str(tmp_path), seed)
    await driver.open()
    try:
        await driver.run(STEPS)
    finally:
        print(f"seed {seed}: {driver.counts}")
        await driver.close()
