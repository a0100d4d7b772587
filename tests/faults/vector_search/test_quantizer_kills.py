"""Processes are killed while a collection in lists is written, searched, trained anew and tuned; `make soak`: 50 times.

Those killed are vector_search processes and their children that train or explore. Nothing that was acknowledged is
lost, every hit has the score of what was written, recall holds, and all shards end with lists of one quantizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from common.registry.tunings import Tunings
from common.wire.tuning import CollectionTuning, IndexPlan, IndexSetting, TuningGoal
from tests.conftest import PROFILE
from tests.faults.vector_search.test_placement_kills import DIMENSION, LIMIT_S, World, vector
from tests.support.waiting import until

KILLS = 50 if PROFILE == "soak" else 3
SHARDS, REPLICAS, WRITERS = 2, 2, 2
BASE, AT_ONCE = (3000 if PROFILE == "soak" else 2200), 500
LISTS = (8, 12, 16)
GOAL, K = 0.9, 10
PROGRESS = 8  # operations that succeed between two kills
TUNE_EVERY = 4  # so many retrainings
LAST = 1_000_000  # the number of the last retraining
LOOKS = 12  # so many answers tell of all replicas
_CHILD_S = 4.0  # how long a kill waits for a child to kill
_AGAIN_S = 0.1
_CHILDREN = {"quantizer_training": "trainer", "tuning.exploration": "tuner"}


class ListsWorld:
    """A collection whose documents of the base never change, the world around it, and what was done to it."""

    def __init__(self, world: World, bus: Bus, collection: str) -> None:
        self.world, self.tunings, self.collection = world, Tunings(bus), collection
        self.names = [f"b{number}" for number in range(BASE)]
        base = np.stack([vector(name, 1) for name in self.names])
        self.base = base / np.linalg.norm(base, axis=1, keepdims=True)
        self.counts: Counter[str] = Counter()
        self.missed: list[int] = []

    async def fill(self) -> None:
        """Store the base."""
        oracle, path = self.world.oracle, f"{self.world.path}/documents"
        for at in range(0, BASE, AT_ONCE):
            some = self.names[at : at + AT_ONCE]
            told = [{"id": name, "vector": vector(name, 1).tolist()} for name in some]
            oracle.applied((await self.world.must("POST", path, {"documents": told}))["applied"])
            oracle.versions |= {name: [1] for name in some}
            oracle.present |= dict.fromkeys(some, 1)

    # -- what runs at the same time

    @property
    def recall(self) -> float:
        """The share of the true nearest of the base that was found since `missed` was emptied."""
        return 1 - sum(self.missed) / (K * len(self.missed))

    async def search(self) -> None:
        """Search by the lists, and count which of the true nearest of the base are missing."""
        while not self.world.stopping:
            await self.ask(vector("asked", self.world.random.randrange(10_000)))
            self.world.oracle.done += 1

    async def ask(self, query: Any) -> None:
        body = {"vector": query.tolist(), "k": K, "include_lists": True}
        found = await self.world.must("POST", f"{self.world.path}/search", body)
        hits = {hit["id"]: hit["score"] for hit in found["data"]}
        assert len(hits) == K
        scores = self.base @ (query / np.linalg.norm(query))
        best = np.argsort(-scores)[:K]
        worst = min(hits.values()) + 1e-4
        missing = [i for i in best if scores[i] > worst and self.names[i] not in hits]
        self.missed.append(len(missing))
        told = found["search"]
        self.counts["searches"] += 1
        self.counts["by_lists"] += "lists" in told
        assert ("lists" in told) == ("scanned" in told)
        assert len(told.get("scanned", [[]])[0]) <= told.get("lists", 0)
        self.counts["by_several_quantizers"] += "," in told.get("quantizer", "")

    async def operate(self) -> None:
        """Have all shards trained anew, and now and then tuned, again and again."""
        number = 0
        while not self.world.stopping:
            number += 1
            tuned = PROFILE == "soak" and number % TUNE_EVERY == 0
            await (self.tune() if tuned else self.retrain(number))

    async def tune(self) -> None:
        """Have the collection tuned, whatever that ends with."""
        path = f"{self.world.path}/tune"
        await self.world.call("POST", path, {"recall": GOAL})

        async def ended() -> bool:
            _, told = await self.world.call("GET", path)
            return self.world.stopping or told.get("state") in {"done", "failed"}

        await until(ended, "the end of a tuning", seconds=5 * LIMIT_S)
        if not self.world.stopping:
            self.counts["tunings"] += 1

    async def retrain(self, number: int) -> None:
        """Put a plan with another number of lists in force, and wait until all shards have one quantizer for it."""
        rows = BASE // SHARDS
        setting = IndexSetting("ivfpq", lists=LISTS[number % len(LISTS)])
        plan = IndexPlan(f"plan{number}", setting, GOAL, rows)
        new = CollectionTuning(self.collection, plan.tuning, TuningGoal(GOAL), state="done")

        def changed(known: CollectionTuning | None) -> CollectionTuning | None:
            if known is not None and known.state not in {"done", "failed"}:
                return None
            return msgspec.structs.replace(known or new, in_force=plan, id=plan.tuning)

        made = await self.tunings.update(self.collection, changed)
        if made is None:
            return

        async def followed() -> str:
            return "stopped" if self.world.stopping else await self.outcome(plan.tuning)

        self.counts[await until(followed, f"lists by {plan}", seconds=LIMIT_S)] += 1

    async def outcome(self, tuning: str) -> str:
        """Return "retrained" once all shards have proved a plan by one quantizer, "refused" if one gave it up."""
        status, told = await self.world.call("GET", f"{self.world.path}/explain")
        if status != 200:
            return ""
        if any(f"tuning {tuning} was given up" in each["why"] for each in told["shards"]):
            return "refused"
        plans = [each["plan"] or {} for each in told["shards"]]
        built = [p.get("tuning") == tuning and p.get("proved") is not None for p in plans]
        versions = {each.get("quantizer", "") for each in told["shards"]}
        return "retrained" if all(built) and len(versions) == 1 and "" not in versions else ""

    async def kill(self) -> None:
        """Kill one process or child after another, each time when some operations have succeeded."""
        for number in range(KILLS):
            await self.world.progress(PROGRESS, number)
            if number % 3 == 0 and await self.kill_child():
                continue
            if number % 8 == 7:
                await self.retrained()
            victim = self.world.random.choice(self.world.search)
            await asyncio.to_thread(victim.kill)
            self.counts["killed_process"] += 1
            await asyncio.sleep(self.world.random.uniform(0.0, 1.0))
            await asyncio.to_thread(victim.start)

    async def retrained(self) -> None:
        """Wait until one more retraining has succeeded."""
        before = self.counts["retrained"]

        async def more() -> bool:
            return self.counts["retrained"] > before

        await until(more, "another retraining", seconds=5 * LIMIT_S)

    async def kill_child(self) -> bool:
        """Kill a child that trains or explores, as soon as there is one; False if there was none for a while."""
        give_up = asyncio.get_running_loop().time() + _CHILD_S
        while asyncio.get_running_loop().time() < give_up:
            for pid, what in self.children().items():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.counts[f"killed_{what}"] += 1
                    return True
            await asyncio.sleep(_AGAIN_S)
        return False

    def children(self) -> dict[int, str]:
        """Return the children of the processes that train or explore, by their ids."""
        parents = {p.process.pid for p in self.world.search if p.process is not None}
        found: dict[int, str] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                line = (path / "cmdline").read_bytes().decode(errors="replace")
                if parent in parents:
                    found |= {
                        int(path.name): what for name, what in _CHILDREN.items() if name in line
                    }
        return found

    # -- the end

    async def check(self) -> None:
        """All shards have lists of one quantizer, and find enough."""
        await until(self.quiet, "the end of tunings", seconds=LIMIT_S)
        self.world.stopping = False
        await self.retrain(LAST)
        await until(self.settled, "lists of one quantizer in all shards", seconds=LIMIT_S)
        during, self.missed = self.recall, []
        assert during >= GOAL
        for number in range(200 if PROFILE == "soak" else 50):
            await self.ask(vector("last", number))
        assert self.recall >= GOAL
        told = {
            "kills": KILLS,
            **dict(sorted(self.counts.items())),
            "writes": len([v for each in self.world.oracle.versions.values() for v in each]) - BASE,
            "recall_under_kills": round(during, 4),
            "recall_after": round(self.recall, 4),
        }
        print(json.dumps(told))

    async def quiet(self) -> bool:
        known = await self.tunings.get(self.collection)
        return known is None or known.state in {"done", "failed"}

    async def settled(self) -> bool:
        """Return whether all shards have lists of one quantizer, whichever of their replicas is asked."""
        for _ in range(LOOKS):
            status, told = await self.world.call("GET", f"{self.world.path}/explain")
            shards = told["shards"] if status == 200 else [{}]
            ways = {(each.get("kind"), each.get("path"), each.get("quantizer")) for each in shards}
            if len(ways) != 1 or next(iter(ways))[:2] != ("ivfpq", "ivfpq"):
                return False
        return True


@pytest.mark.timeout(3600 if PROFILE == "soak" else 300)
async def test_kills_while_a_collection_in_lists_is_searched_trained_and_tuned(
    seed: int, tmp_path: Path
) -> None:
    """kill -9 of vector_search processes, trainers and tuners: nothing is lost, and no search is wrong."""
    world = await asyncio.to_thread(World, seed)
    config = Common(data_dir=str(tmp_path), redis_url=world.mesh.redis.url)
    bus = await Bus.open(config, SystemClock())
    try:
        await asyncio.to_thread(world.start)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as http:
            world.http = http
            wanted = {"name": "kills", "model": None, "dimension": DIMENSION}

            async def created() -> Any:
                body = {**wanted, "shards": SHARDS, "replicas": REPLICAS}
                status, told = await world.call("POST", "/v1/collections", body)
                return told if status in {200, 201} else None

            made = await until(created, "two processes to place on")
            lists = ListsWorld(world, bus, made["id"])
            await lists.fill()
            await lists.retrain(0)
            work = [world.write(writer) for writer in range(WRITERS)]
            work += [world.read(), lists.search(), lists.operate()]
            await world.amid(lists.kill(), *work)
            await world.check()
            await lists.check()
    except BaseException:
        with contextlib.suppress(OSError):
            print(world.mesh.logs())
        raise
    finally:
        await bus.close()
        await asyncio.to_thread(world.close)
