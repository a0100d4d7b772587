"""Collections whose shards are placed on several processes: each opens its own, and searches find all of them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from spillway_client import AsyncSpillway

from services.vector_search.text_index import PIECE
from tests.integration.router.test_collections import call
from tests.integration.router.test_shard_reads import DIMENSION, ROWS, points
from tests.support.mesh import ROOT, Mesh
from tests.support.waiting import until

PROCESSES = 3


@pytest.fixture(scope="module")
def spread() -> Iterator[Mesh]:
    """A mesh with three vector_search processes."""
    made = Mesh()
    try:
        for number in range(1, PROCESSES):
            made.add("vector_search", str(number)).ports()
        asyncio.run(_all_there(made.url))
        yield made
    finally:
        made.close()


async def _all_there(url: str) -> None:
    """Wait until the router can place something on every process."""
    async with (
        aiohttp.ClientSession(url) as http,
        placed(http, "everywhere", 1, PROCESSES, count=1),
    ):
        pass


@pytest.fixture
async def http(spread: Mesh) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose relative URLs are the router's."""
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(spread.url, timeout=timeout) as session:
        yield session


@contextlib.asynccontextmanager
async def placed(
    http: aiohttp.ClientSession, name: str, shards: int, replicas: int = 1, count: int = ROWS
) -> AsyncIterator[str]:
    """A placed collection of vectors; its path."""
    made = {"name": name, "model": None, "dimension": DIMENSION}
    created = made | {"shards": shards, "replicas": replicas}

    async def enough() -> bool:
        status, body = await call(http, "POST", "/v1/collections", created)
        assert status in {201, 422}, body
        return status == 201

    await until(enough, "as many processes as replicas")
    path = f"/v1/collections/{name}"
    await store(http, path, count)
    yield path
    await call(http, "DELETE", path)


async def store(http: aiohttp.ClientSession, path: str, count: int, first: int = 0) -> Any:
    rows = points(first + count)
    documents = [{"id": f"d{i}", "vector": rows[i].tolist()} for i in range(first, first + count)]
    status, body = await call(http, "POST", f"{path}/documents", {"documents": documents})
    assert status == 200, body
    return body["applied"]


def nearest(number: int, count: int = ROWS, k: int = 5) -> list[str]:
    rows = points(count)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return [f"d{i}" for i in np.argsort(-(unit @ unit[number]))[:k]]


async def search(http: aiohttp.ClientSession, path: str, number: int, **more: Any) -> Any:
    body = {"vector": points(number + 1)[number].tolist(), "k": 5, **more}
    return await call(http, "POST", f"{path}/search", body)


def ids(found: Any) -> list[str]:
    return [hit["id"] for hit in found["data"]]


async def shards_of(http: aiohttp.ClientSession, path: str) -> Any:
    status, body = await call(http, "GET", f"{path}/shards")
    assert status == 200, body
    return body


async def test_shards_are_spread_and_searched_as_one(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """Six shards on three processes, two each, which open no others; search, list and delete find every document."""
    async with placed(http, "spread", 6) as path:
        listed = await shards_of(http, path)
        assert listed["placed"]
        assert listed["missing"] == []
        holders = [one["replicas"][0]["name"] for one in listed["data"]]
        assert sorted(holders.count(name) for name in set(holders)) == [2, 2, 2]
        collection = (await call(http, "GET", path))[1]
        assert collection["stats"]["documents"] == ROWS
        here = sorted(
            int(found.name)
            for found in spread.directory.glob(f"search/*/{collection['id']}/[0-9]*")
        )
        assert here == list(range(6))
        for number in range(0, ROWS, 7):
            status, found = await search(http, path, number)
            assert (status, ids(found)) == (200, nearest(number))
            key = {"Idempotency-Key": f"spread-{number}"}
            body = {"vector": points(ROWS)[number].tolist(), "k": 5}
            status, job = await call(http, "POST", f"{path}/search", body, **key)
            assert (status, ids(job)) == (200, nearest(number))
        seen: list[str] = []
        after = ""
        while True:
            _, page = await call(http, "GET", f"{path}/documents?limit=25&after={after}")
            seen += [doc["id"] for doc in page["data"]]
            after = page["next"]
            if after is None:
                break
        assert sorted(seen) == sorted(f"d{i}" for i in range(ROWS))
        status, gone = await call(http, "POST", f"{path}/documents/delete", {"ids": nearest(3)[:2]})
        assert (status, gone["deleted"]) == (200, 2)
        status, found = await search(http, path, 3, after=gone["applied"])
        assert (status, ids(found)) == (200, nearest(3, k=7)[2:])


async def test_a_dead_shard_is_named_and_a_partial_search_answers_without_it(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """With one of three processes killed: 503 names the shard, a partial search lists it, and it comes back."""
    async with placed(http, "dead", 3) as path:
        await search(http, path, 0)
        spread.search.kill()

        async def missing() -> Any:
            return (await shards_of(http, path))["missing"]

        lost = await until(missing, "a missing shard")
        status, error = await search(http, path, 1)
        assert (status, error["error"]["code"]) == (503, "shard_missing")
        assert any(f"shard {n} " in error["error"]["message"] for n in lost)
        for key in ({}, {"Idempotency-Key": "partial"}):
            body = {"vector": points(2)[1].tolist(), "k": ROWS, "partial": True}
            status, found = await call(http, "POST", f"{path}/search", body, **key)
            assert status == 200, found
            assert [one["shard"] for one in found["missing"]] == lost
            assert 0 < len(found["data"]) < ROWS
        spread.search.start()

        async def whole() -> bool:
            status, found = await search(http, path, 1, partial=True)
            return status == 200 and found["missing"] == [] and ids(found) == nearest(1)

        await until(whole, "all shards")


async def test_a_stopped_replica_is_hedged(spread: Mesh, http: aiohttp.ClientSession) -> None:
    """With two replicas of each shard and one process stopped, every search is answered whole by the other replicas."""
    async with placed(http, "hedged", 3, replicas=2) as path:

        async def both() -> bool:
            listed = (await shards_of(http, path))["data"]
            every = [[each["rows"] for each in one["replicas"]] for one in listed]
            serve = [each["state"] == "serving" for one in listed for each in one["replicas"]]
            whole = all(len(set(rows)) == 1 for rows in every)
            return (
                len(serve) == 6 and all(serve) and whole and sum(x[0] or 0 for x in every) == ROWS
            )

        await until(both, "two serving replicas of each shard, with all rows")
        await search(http, path, 0)
        with spread.search.halted():
            for number in range(20):
                status, found = await search(http, path, number)
                assert (status, ids(found)) == (200, nearest(number))
        await asyncio.sleep(0)


async def test_bad_requests_are_named(http: aiohttp.ClientSession) -> None:
    """Too many replicas, and numbers out of bounds."""
    body = {"name": "bad", "model": None, "dimension": 4, "replicas": 9}
    status, error = await call(http, "POST", "/v1/collections", body)
    assert (status, error["error"]["code"]) == (422, "too_few_processes")
    status, error = await call(http, "POST", "/v1/collections", body | {"shards": 0})
    assert status == 400
    status, error = await call(http, "GET", "/v1/collections/nothing/shards")
    assert (status, error["error"]["code"]) == (404, "collection_not_found")


async def settled(http: aiohttp.ClientSession, path: str) -> Any:
    """Wait until every replica serves and nothing moves; return the shards."""

    async def done() -> Any:
        listed = await shards_of(http, path)
        states = {each["state"] for one in listed["data"] for each in one["replicas"]}
        splits = any(one["split"] for one in listed["data"])
        return listed if states == {"serving"} and not splits else None

    return await until(done, "settled shards")


async def every_document(http: aiohttp.ClientSession, path: str) -> set[str]:
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        status, page = await call(http, "GET", f"{path}/documents?limit=1000&after={after}")
        if status == 409 and page["error"]["code"] == "layout_changed":
            seen, after = [], ""
            continue
        assert status == 200, page
        seen += [doc["id"] for doc in page["data"]]
        after = page["next"]
    assert len(seen) == len(set(seen))
    return set(seen)


async def test_a_shard_moves_and_replicas_are_added_while_it_is_written(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """A shard goes from one process to another under writes and searches; a second replica is added, and dropped."""
    async with placed(http, "moved", 2) as path:
        collection = (await call(http, "GET", path))[1]["id"]
        (one,) = (await shards_of(http, path))["data"][:1]
        source, number = one["replicas"][0]["name"], one["shard"]
        stop, stored = asyncio.Event(), ROWS

        async def writes() -> None:
            nonlocal stored
            while not stop.is_set():
                await store(http, path, 5, first=stored)
                stored += 5

        async def searches() -> None:
            while not stop.is_set():
                status, found = await search(http, path, 3)
                assert (status, ids(found)[0]) == (200, "d3")

        tasks = [asyncio.create_task(writes()), asyncio.create_task(searches())]
        status, body = await call(http, "POST", f"{path}/shards/{number}/move", {"from": source})
        assert status == 200, body
        listed = await settled(http, path)
        stop.set()
        await asyncio.gather(*tasks)
        names = [each["name"] for each in listed["data"][0]["replicas"]]
        assert len(names) == 1
        assert source not in names
        assert await every_document(http, path) == {f"d{i}" for i in range(stored)}

        def held() -> list[Any]:
            return list(spread.directory.glob(f"search/*/{collection}/{number}"))

        await until(lambda: len(held()) == 1, "the source's files to be gone")
        status, body = await call(http, "POST", f"{path}/replicas", {"replicas": 2})
        assert status == 200, body
        listed = await settled(http, path)
        assert [len(one["replicas"]) for one in listed["data"]] == [2, 2]
        assert {each["rows"] is not None for one in listed["data"] for each in one["replicas"]}
        drop = {"replica": names[0]}
        status, body = await call(http, "POST", f"{path}/shards/{number}/drop", drop)
        assert status == 200, body
        await until(lambda: len(held()) == 1, "the dropped replica's files to be gone")
        assert await every_document(http, path) == {f"d{i}" for i in range(stored)}
        status, error = await call(http, "POST", f"{path}/shards/99/move")
        assert (status, error["error"]["code"]) == (404, "shard_not_found")
        status, error = await call(http, "POST", f"{path}/shards/{number}/reset")
        assert (status, error["error"]["code"]) == (409, "shard_busy")


async def test_a_replica_whose_disk_is_gone_is_filled_again(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """A process comes back with an empty disk: it is filled from the other replica, and no empty shard is served."""
    async with placed(http, "emptied", 2, replicas=3) as path:
        collection = (await call(http, "GET", path))[1]["id"]
        await settled(http, path)
        spread.search.kill()
        root = spread.directory / "search" / "0" / collection
        for number in (0, 1):
            for file in (root / str(number)).iterdir():
                file.unlink()
            (root / str(number)).rmdir()
        await store(http, path, 10, first=ROWS)
        spread.search.start()

        async def again() -> bool:
            listed = await settled(http, path)
            every = [each for one in listed["data"] for each in one["replicas"]]
            alike = all(
                len({each["rows"] for each in one["replicas"]}) == 1 for one in listed["data"]
            )
            return (
                all(each["alive"] for each in every) and alike and len(list(root.glob("[01]"))) == 2
            )

        await until(again, "a filled replica")
        assert await every_document(http, path) == {f"d{i}" for i in range(ROWS + 10)}


async def test_a_shard_is_split_while_it_is_written_and_searched(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """A plain collection is split, and one of the children again: nothing is missing, old tokens hold, new ones too."""
    made = {"name": "split", "model": None, "dimension": DIMENSION}
    status, body = await call(http, "POST", "/v1/collections", made)
    assert status == 201, body
    path = "/v1/collections/split"
    token = await store(http, path, ROWS)
    stop, stored = asyncio.Event(), ROWS

    async def writes() -> None:
        nonlocal stored
        while not stop.is_set():
            applied = await store(http, path, 5, first=stored)
            stored += 5
            body = {"vector": points(stored)[stored - 1].tolist(), "k": 1, "after": applied}
            status, found = await call(http, "POST", f"{path}/search", body)
            assert (status, ids(found)) == (200, [f"d{stored - 1}"])
            if stored % 50 == 0:
                gone = {"ids": [f"d{stored - 1}"]}
                status, body = await call(http, "POST", f"{path}/documents/delete", gone)
                assert (status, body["deleted"]) == (200, 1)
                status, found = await search(http, path, stored - 1, after=body["applied"])
                assert status == 200
                assert f"d{stored - 1}" not in ids(found)

    async def searches() -> None:
        while not stop.is_set():
            status, found = await search(http, path, 3, after=token)
            assert (status, ids(found)[0]) == (200, "d3"), found

    tasks = [asyncio.create_task(writes()), asyncio.create_task(searches())]
    for layout in (1, 2):
        number = (await shards_of(http, path))["data"][0]["shard"]
        status, body = await call(http, "POST", f"{path}/shards/{number}/split")
        assert status == 200, body

        async def done(layout: int = layout) -> bool:
            failed = [task for task in tasks if task.done()]
            for task in failed:
                task.result()
            return bool((await shards_of(http, path))["layout"] == layout)

        await until(done, "the split")
    stop.set()
    await asyncio.gather(*tasks)
    listed = await settled(http, path)
    assert [one["shard"] for one in listed["data"]] == [3, 4, 2]
    expected = {f"d{i}" for i in range(stored)}
    expected -= {f"d{i - 1}" for i in range(50, stored + 1, 50) if i > ROWS}

    async def counted() -> bool:
        rows = [one["rows"] or 0 for one in (await shards_of(http, path))["data"]]
        return sum(rows) == len(expected)

    await until(counted, "rows as reported")
    assert await every_document(http, path) == expected
    status, found = await search(http, path, 5, after=token)
    assert (status, ids(found)[0]) == (200, "d5")
    status, error = await search(http, path, 5, after=",,,,,,,1-0")
    assert (status, error["error"]["code"]) == (409, "layout_changed")
    status, error = await call(http, "GET", f"{path}/documents?after=0:d1")
    assert (status, error["error"]["code"]) == (409, "layout_changed")
    await call(http, "DELETE", path)


async def test_a_delete_sees_what_was_stored(spread: Mesh, http: aiohttp.ClientSession) -> None:
    """A write looks up documents on any replica, also on one that lags: it sees all that was acknowledged before."""
    async with placed(http, "seen", 1, PROCESSES, count=1) as path:
        for number in range(1, 20):
            await store(http, path, 1, first=number)
            status, body = await call(
                http, "POST", f"{path}/documents/delete", {"ids": [f"d{number}"]}
            )
            assert (status, body["deleted"]) == (200, 1), number


async def test_words_are_found_while_a_shard_is_split_and_moved(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """A search by words finds the same documents before, during and after a split and a move, of the whole index."""
    path, count = "/v1/collections/words", 2 * PIECE
    status, body = await call(
        http, "POST", "/v1/collections", {"name": "words", "model": None, "dimension": DIMENSION}
    )
    assert status == 201, body
    rows = points(count)
    documents = [
        {
            "id": f"d{i}",
            "vector": rows[i].tolist(),
            "text": f"{'kiwi' if i % 9 == 0 else 'oak'} {i}",
        }
        for i in range(count)
    ]
    for first in range(0, count, 500):
        body = {"documents": documents[first : first + 500]}
        status, body = await call(http, "POST", f"{path}/documents", body)
        assert status == 200, body
    written = body["applied"]  # a replica may be behind until it is asked for this
    kiwis = {f"d{i}" for i in range(0, count, 9)}
    stop, done = asyncio.Event(), 0

    async def searches() -> None:
        nonlocal done, written
        while not stop.is_set():
            headers = {"Idempotency-Key": f"words-{done}"} if done % 5 == 0 else {}
            body = {"text": "kiwi", "mode": "text", "k": count, "after": written}
            status, found = await call(http, "POST", f"{path}/search", body, **headers)
            if status == 409 and found["error"]["code"] == "layout_changed":
                written = None  # shards that took the place of others hold all that these held
                continue
            assert (status, set(ids(found))) == (200, kiwis)
            assert "text_indexed" not in found
            done += 1

    async def after(change: str, body: dict[str, Any], changed: Callable[[Any], bool]) -> None:
        """Ask for a change, and wait until it is over and some more searches have ended."""
        status, answer = await call(http, "POST", f"{path}/{change}", body)
        assert status == 200, answer

        async def over() -> bool:
            if task.done():
                task.result()
            return changed((await shards_of(http, path))["data"])

        await until(over, change)
        before = done
        await until(lambda: task.done() or done > before + 5, "searches")

    task = asyncio.create_task(searches())
    await until(lambda: task.done() or done > 5, "searches")
    await after("shards/0/split", {}, lambda shards: [one["shard"] for one in shards] == [1, 2])
    listed = await settled(http, path)
    holders = {each["name"] for each in listed["data"][0]["replicas"]}
    await call(http, "POST", f"{path}/replicas", {"replicas": 1})
    listed = await settled(http, path)
    (source,) = [each["name"] for each in listed["data"][0]["replicas"]]
    assert source in holders

    def moved(shards: Any) -> bool:
        replicas = shards[0]["replicas"]
        return [each["state"] for each in replicas] == ["serving"] and replicas[0]["name"] != source

    await after("shards/1/move", {"from": source}, moved)
    stop.set()
    await task
    await call(http, "DELETE", path)


async def test_an_emptied_shard_is_split(spread: Mesh, http: aiohttp.ClientSession) -> None:
    """All rows deleted, then split: two empty shards, which take writes."""
    async with placed(http, "emptied-split", 1, count=10) as path:
        gone = {"ids": [f"d{i}" for i in range(10)]}
        await call(http, "POST", f"{path}/documents/delete", gone)
        status, body = await call(http, "POST", f"{path}/shards/0/split")
        assert status == 200, body
        status, error = await call(http, "POST", f"{path}/shards/0/move")
        if status != 404:  # the split may be over
            assert (status, error["error"]["code"]) == (409, "shard_busy")

        async def done() -> bool:
            return bool((await shards_of(http, path))["layout"] == 1)

        await until(done, "the split")
        assert await every_document(http, path) == set()
        await store(http, path, 10)
        assert await every_document(http, path) == {f"d{i}" for i in range(10)}


async def test_a_full_disk_is_told_and_the_source_goes_on(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """The disk of the process that a shard moves to is full: `why` says so, searches go on, and with space it moves."""
    async with placed(http, "full", 1, count=600) as path:
        (one,) = (await shards_of(http, path))["data"]
        source = one["replicas"][0]["name"]
        limited = [each for each in spread.processes if each.service == "vector_search"]
        limits = {}
        for each in limited:
            assert each.process is not None
            pid = each.process.pid
            limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (16_384, limits[pid][1]))
        try:
            status, body = await call(http, "POST", f"{path}/shards/0/move", {"from": source})
            assert status == 200, body

            async def told() -> bool:
                replicas = (await shards_of(http, path))["data"][0]["replicas"]
                return any("full" in each["why"] for each in replicas)

            await until(told, "the reason")
            status, found = await search(http, path, 5)
            assert (status, ids(found)[0]) == (200, "d5")
        finally:
            for pid, limit in limits.items():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        listed = await settled(http, path)
        assert [each["name"] for each in listed["data"][0]["replicas"]] != [source]
        assert await every_document(http, path) == {f"d{i}" for i in range(600)}


async def test_a_lost_shard_is_begun_anew(spread: Mesh, http: aiohttp.ClientSession) -> None:
    """The only copy of a shard is away for good: it is begun anew, old tokens are refused, the copy is not mixed in."""
    async with placed(http, "lost", 3) as path:
        token = await store(http, path, 5, first=ROWS)
        spread.search.kill()

        async def missing() -> Any:
            return (await shards_of(http, path))["missing"]

        lost = await until(missing, "a missing shard")
        for number in lost:
            status, body = await call(http, "POST", f"{path}/shards/{number}/reset")
            assert status == 200, body

        async def whole() -> bool:
            status, _ = await search(http, path, 1)
            return status == 200 and not (await shards_of(http, path))["missing"]

        await until(whole, "no missing shard")
        kept = await every_document(http, path)
        assert 0 < len(kept) < ROWS + 5
        parts = token.split(",")
        if any(len(parts) > number and parts[number] for number in lost):
            status, error = await search(http, path, 1, after=token)
            assert (status, error["error"]["code"]) == (409, "layout_changed")
        spread.search.start()
        await settled(http, path)
        await store(http, path, ROWS + 5)
        assert await every_document(http, path) == {f"d{i}" for i in range(ROWS + 5)}


async def test_a_new_process_is_filled_with_plain_collections(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """A process that starts empty copies a collection without a placement, whose stream has been cut by then."""
    made = {"name": "plain", "model": None, "dimension": DIMENSION}
    status, body = await call(http, "POST", "/v1/collections", made)
    assert status == 201, body
    path = "/v1/collections/plain"
    await store(http, path, ROWS)
    searches = [each for each in spread.processes if each.service == "vector_search"]
    for (
        each
    ) in searches:  # a stop takes snapshots, and what all of them cover is cut from the stream
        await asyncio.to_thread(each.stop)
    for each in searches:
        each.start()
    late = spread.add("vector_search", "late")
    directory = spread.directory / "search" / "late" / body["id"] / "0"
    await until((directory / "documents.sqlite").exists, "the files of a filled shard")

    async def reported() -> bool:
        status, error = await call(http, "POST", f"{path}/shards/0/move")
        assert status in {200, 409, 422, 503}, error
        listed = await shards_of(http, path)
        rows = [each["rows"] for each in listed["data"][0]["replicas"]]
        return len(rows) == PROCESSES + 1 and set(rows) == {ROWS}

    await until(reported, "all rows on every process")
    await asyncio.to_thread(late.stop)
    await call(http, "DELETE", path)


async def test_the_command_and_the_sdk_tell_and_change_shards(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """`spillway shards` lists and splits, and the SDK sees the same; a partial search has nothing missing."""
    async with placed(http, "verbs", 2) as path:

        def command(*words: str) -> tuple[int, str]:
            done = subprocess.run(
                [sys.executable, "-m", "cli.main", "shards", *words, "--url", spread.url],
                capture_output=True,
                text=True,
                cwd=ROOT,
                timeout=100,
                check=False,
            )
            return done.returncode, done.stdout + done.stderr

        status, told = await asyncio.to_thread(command, "list", "verbs")
        assert (status, "shard 0  50 %" in told, "serving" in told) == (0, True, True), told
        status, told = await asyncio.to_thread(command, "split", "verbs", "0", "--wait")
        assert (status, "layout 1" in told, "shard 2  25 %" in told) == (0, True, True), told
        status, told = await asyncio.to_thread(command, "reset", "verbs", "1")
        assert (status, "--yes" in told) == (2, True)
        status, told = await asyncio.to_thread(command, "drop", "verbs", "1", "nobody")
        assert (status, "no replica" in told) == (1, True)
        async with AsyncSpillway(spread.url) as client:
            found = await client.collections.shards("verbs")
            assert [one.shard for one in found.data] == [2, 3, 1]
            assert [one.replicas[0].state for one in found.data] == ["serving"] * 3
            result = await client.search("verbs", vector=points(1)[0].tolist(), k=1, partial=True)
            assert ([hit.id for hit in result.data], result.missing) == (["d0"], [])
            moved = await client.collections.move_shard("verbs", 1)
            assert len(moved.data[2].replicas) == 2
        await settled(http, path)
