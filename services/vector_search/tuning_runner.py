"""The tunings that one vector_search process carries out, and the plans that its shards keep to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from common import log
from common.bus import Bus, BusDown, BusFull
from common.bus.writes import Shard as Key
from common.errors import SpillwayError
from common.registry.collections import Collections
from common.registry.tunings import Tunings
from common.tasks import cancel, in_pool
from common.wire.tuning import ENDED, CollectionTuning, IndexPlan, TuningState
from services.vector_search.shard_manager import ShardManager
from services.vector_search.tuning.exploration import Exploration, ExplorationFiles
from services.vector_search.tuning.shard_tuning import ShardTuning

_COMPARE_S = 30.0
_ATTEMPTS = 3
_TOLD = 300  # of what a failed exploration wrote to its error output
_FOLDER = "tuning"
_EXPLORATION = "services.vector_search.tuning.exploration"
_log = log.get("vector_search")


class TuningRunner:
    """Takes up tunings of collections whose first shard this process holds, and has shards follow the plans in force.

    One process, the tuner, explores in a process of its own, which goes on after a kill with what it had measured. Its
    shards build by the chosen plan first; once that is proved, it is in force for all. `wake` has a shard maintained.
    Where the tuner has died, or no longer holds the first shard, another process that does takes its place.
    """

    def __init__(self, shards: ShardManager, bus: Bus, *, wake: Callable[[Key], None]) -> None:
        self._shards, self._bus, self._wake = shards, bus, wake
        self._tunings = Tunings(bus)
        self._pool = ThreadPoolExecutor(1, "tuning")
        self._keeper = ThreadPoolExecutor(1, "plans")  # what the registry waits for is never long
        self._known: dict[str, CollectionTuning] = {}
        self._seen: bytes | None = None
        self._next_s = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the tuning's id

    async def step(self) -> None:
        """Read what has changed, and do what is due."""
        now = asyncio.get_running_loop().time()
        changes = await Collections(self._bus).changes()
        if changes != self._seen or now >= self._next_s:
            self._known = await self._tunings.all()
            self._seen, self._next_s = changes, now + _COMPARE_S
            await self._forget_removed()
        for name, tuning in list(self._known.items()):
            if name in self._shards.records:
                await self._follow(tuning)
        await self._stop_unwanted()

    async def _forget_removed(self) -> None:
        """Forget the tunings of collections that were deleted, or re-embedded, which gives them another id."""
        others = self._known.keys() - self._shards.records.keys()
        removed = await Collections(self._bus).removed() if others else set()
        for name in others & removed:
            await self._tunings.remove(name)
            del self._known[name]

    async def _stop_unwanted(self) -> None:
        """End work for tunings that were cancelled or replaced, or are another process' by now."""
        wanted = {
            each.id
            for each in self._known.values()
            if each.tuner == self._shards.name and each.state not in ENDED and self._first(each.collection)
        }  # fmt: skip
        unwanted = self._tasks.keys() - wanted
        await cancel(*(self._tasks[each] for each in unwanted))
        for each in self._known.values():
            first = self._first(each.collection) if each.id in unwanted else None
            if first is not None:
                await in_pool(self._pool, _only, first.directory / _FOLDER, "")

    async def close(self) -> None:
        """End explorations; the next start goes on with them."""
        await cancel(*self._tasks.values())
        for pool in (self._pool, self._keeper):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, tuning: CollectionTuning) -> None:
        mine = tuning.tuner == self._shards.name
        building = mine and tuning.state == "building"
        await self._give(tuning.collection, tuning.plan if building else tuning.in_force)
        first = self._first(tuning.collection)
        if first is None or tuning.state in ENDED:
            return
        if not mine:
            if await self._is_free(tuning):
                await self._claim(tuning)
        elif tuning.state == "exploring":
            self._begin(tuning, self._explore(tuning, first))
        elif building and tuning.plan is not None:
            self._begin(tuning, self._check(tuning, tuning.plan, first))

    def _begin(self, tuning: CollectionTuning, work: Coroutine[Any, Any, None]) -> None:
        """Work for a tuning beside all else, unless that goes on already."""
        if tuning.id in self._tasks:
            work.close()
            return
        task = asyncio.create_task(self._guarded(tuning, work))
        self._tasks[tuning.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(tuning.id, None))

    async def _guarded(self, tuning: CollectionTuning, work: Coroutine[Any, Any, None]) -> None:
        """Await work for a tuning; an error ends the tuning and nothing else."""
        try:
            await work
        except (BusDown, BusFull) as error:
            _log.warning("tuning_waits_for_bus", tuning=tuning.id, why=str(error))
        except Exception as error:  # noqa: BLE001 - one tuning's fault must not end the service
            _log.exception("tuning_failed", tuning=tuning.id)
            with contextlib.suppress(BusDown, BusFull):
                await self._end(tuning, "failed", why=f"{type(error).__name__}: {error}")

    async def _give(self, collection: str, plan: IndexPlan | None) -> None:
        """Have the open shards of a collection keep to a plan."""
        for key, handle in list(self._shards.handles.items()):
            if key[0] != collection or handle.shard is None:
                continue
            now = handle.shard.tuning.now
            if now.plan == plan or (plan is not None and plan.tuning == now.refused):
                continue
            try:
                followed = await in_pool(self._keeper, handle.shard.tuning.follow, plan)
            except SpillwayError as error:  # it is followed, and remembered with the next snapshot
                _log.warning("plan_not_kept", shard=key[1], why=error.message)
                followed = True
            if followed:
                self._wake(key)

    def _first(self, collection: str) -> ShardTuning | None:
        """Return the tuning of a collection's shard with the least number, if it is open here."""
        placement = self._shards.placements.get(collection)
        number = 0 if placement is None else min(one.number for one in placement.shards)
        handle = self._shards.handles.get((collection, number))
        if handle is None or handle.shard is None:
            return None
        return handle.shard.tuning

    async def _is_free(self, tuning: CollectionTuning) -> bool:
        """Return whether nobody carries a tuning out: it has no tuner, or that lost the first shard, or is dead."""
        if not tuning.tuner:
            return True
        placement = self._shards.placements.get(tuning.collection)
        if placement is not None:
            first = min(placement.shards, key=lambda one: one.number)
            if tuning.tuner not in {replica.name for replica in first.replicas}:
                return True
        family = self._bus.writes.search_family(tuning.collection)
        return tuning.tuner not in {each.replica for each in await self._bus.workers.living(family)}

    async def _claim(self, tuning: CollectionTuning) -> None:
        """Become the tuner, unless another process was first."""
        name = self._shards.name

        def claimed(known: CollectionTuning | None) -> CollectionTuning | None:
            if (
                known is None
                or (known.id, known.tuner) != (tuning.id, tuning.tuner)
                or known.state in ENDED
            ):
                return None
            state: TuningState = "exploring" if known.state == "asked" else known.state
            return msgspec.structs.replace(known, tuner=name, state=state)

        made = await self._tunings.update(tuning.collection, claimed)
        if made is not None:
            self._known[tuning.collection] = made

    # -- exploring

    async def _explore(self, tuning: CollectionTuning, shard: ShardTuning) -> None:
        """Explore, or go on, and say what was found."""
        folder = shard.directory / _FOLDER / tuning.id
        files = ExplorationFiles(folder)
        await in_pool(self._pool, _only, folder.parent, folder.name)
        if files.work() is None:
            await self._say(tuning, "drawing a sample")
            why = await in_pool(self._pool, shard.give_sample, files, tuning.goal)
            if why:
                await self._end(tuning, "failed", why=why)
                return
        for attempt in range(_ATTEMPTS):
            why = "" if files.result() is not None else await self._run(tuning, folder)
            if not why:
                break
            _log.warning("exploration_failed", tuning=tuning.id, attempt=attempt, why=why)
        await self._found(tuning, files.result(), why)
        await in_pool(self._pool, partial(shutil.rmtree, folder, ignore_errors=True))

    async def _run(self, tuning: CollectionTuning, folder: Path) -> str:
        """Explore in a process of its own; return why it failed, "" if it did not."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_WAIT_POLICY": "passive",  # searches have better uses for the time
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _EXPLORATION, str(folder)),
            stdin=asyncio.subprocess.PIPE,  # it ends when this end of the pipe does
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        try:
            async for line in process.stdout:
                await self._say(tuning, line.decode().strip())
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        told = (await errors).decode(errors="replace").strip()[-_TOLD:]
        return f"its process ended with status {process.returncode}: {told}" if process.returncode else ""  # fmt: skip

    async def _say(self, tuning: CollectionTuning, step: str) -> None:
        await self._change(tuning, lambda known: {"steps": [*known.steps, step]})

    async def _found(self, tuning: CollectionTuning, found: Exploration | None, why: str) -> None:
        if found is None:
            await self._end(tuning, "failed", why=why)
            return
        chosen = found.chosen
        told = {
            "notes": found.notes,
            "explored": found.explored,
            "front": found.front,
            "chosen": chosen,
        }
        if chosen is None:
            await self._end(tuning, "failed", why=found.why, **told)
            return
        plan = IndexPlan(tuning.id, chosen.setting, tuning.goal.recall, found.rows)
        if tuning.plan_only:
            await self._end(tuning, "done", plan=plan, **told)
            return
        await self._change(tuning, lambda _: {"state": "building", "plan": plan, **told})

    # -- building

    async def _check(self, tuning: CollectionTuning, plan: IndexPlan, shard: ShardTuning) -> None:
        """Put a plan in force once an index was built by it and proved; give it up if that failed."""
        now = shard.now
        if now.refused == plan.tuning:
            await self._end(tuning, "failed", why=now.why)
        elif now.plan == plan and now.measured is not None:
            measured = await in_pool(self._pool, shard.measured)
            await self._end(tuning, "done", measured=measured, in_force=plan)

    async def _end(self, tuning: CollectionTuning, state: TuningState, **told: object) -> None:
        ended_ms = self._bus.clock.now_ms()
        await self._change(tuning, lambda _: {"state": state, "ended_ms": ended_ms, **told})

    async def _change(
        self,
        tuning: CollectionTuning,
        change: Callable[[CollectionTuning], dict[str, object]],
    ) -> None:
        """Change what the registry says of a tuning, unless it has ended, or is another process' or another one."""
        name = self._shards.name

        def changed(known: CollectionTuning | None) -> CollectionTuning | None:
            if (
                known is None
                or (known.id, known.tuner) != (tuning.id, name)
                or known.state in ENDED
            ):
                return None
            return msgspec.structs.replace(known, **change(known))

        made = await self._tunings.update(tuning.collection, changed)
        if made is not None:
            self._known[tuning.collection] = made


def _only(folder: Path, kept: str) -> None:
    """Remove what earlier tunings left in a folder."""
    for other in folder.glob("*"):
        if other.name != kept:
            shutil.rmtree(other, ignore_errors=True)
