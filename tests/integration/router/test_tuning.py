"""Tuning over HTTP and by its command, beside searches; the process that tunes is killed and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from cli.main import main
from tests.integration.router.test_collections import call
from tests.support.mesh import Mesh
from tests.support.waiting import until

DIMENSION, ROWS = 8, 1500
ENDED = {"done", "failed", "cancelled"}


async def filled(http: aiohttp.ClientSession, name: str, rows: int, **more: int) -> str:
    body = {"name": name, "model": None, "dimension": DIMENSION, "metric": "dot", **more}
    status, _ = await call(http, "POST", "/v1/collections", body)
    assert status == 201
    path = f"/v1/collections/{name}"
    numbers = np.random.default_rng(1).standard_normal((rows, DIMENSION)).round(3).tolist()
    documents = [{"id": f"d{i}", "vector": each} for i, each in enumerate(numbers)]
    status, stored = await call(http, "POST", f"{path}/documents", {"documents": documents})
    assert status == 200, stored
    return path


async def tuning(http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    status, told = await call(http, "GET", f"{path}/tune")
    assert status == 200, told
    return dict(told)


async def test_a_tuning_goes_on_after_a_kill_and_its_plan_is_followed() -> None:
    """Searches are answered throughout; a second tuning is refused; the plan survives the process."""
    mesh = Mesh()
    try:
        async with aiohttp.ClientSession(mesh.url) as http, asyncio.timeout(150):
            path = await filled(http, "tuned", ROWS)
            status, told = await call(http, "GET", f"{path}/tune")
            assert (status, told["error"]["code"]) == (404, "tuning_not_found")
            status, told = await call(http, "POST", f"{path}/tune", {"recall": 0.9})
            assert (status, told["state"]) == (202, "asked")
            status, told = await call(http, "POST", f"{path}/tune", {"recall": 0.5})
            assert (status, told["error"]["code"]) == (409, "tuning_under_way")
            search = next(each for each in mesh.processes if each.service == "vector_search")

            async def calibrated() -> bool:
                return any("calibrated" in step for step in (await tuning(http, path))["steps"])

            await until(calibrated)
            search.kill()
            search.start()

            async def searched() -> bool:
                body = {"vector": [1.0] * DIMENSION, "k": 10}
                status, found = await call(http, "POST", f"{path}/search", body)
                return status == 200 and len(found["data"]) == 10

            async def ended() -> bool:
                await searched()
                return (await tuning(http, path))["state"] in ENDED

            await until(ended)
            found = await tuning(http, path)
            assert found["state"] == "done", found
            assert found["in_force"] == found["plan"]
            assert found["front"]
            assert found["measured"]["qps"] > 0
            assert found["measured"]["recall"] >= 0.85
            assert await searched()
            _, told = await call(http, "GET", f"{path}/explain")
            assert told["shards"][0]["plan"]["tuning"] == found["id"]
            assert told["shards"][0]["recall_goal"] == 0.9
            assert found["id"] in told["shards"][0]["why"]
    finally:
        mesh.close()


def explorations(mesh: Mesh) -> set[int]:
    """Return the processes that explore below a mesh's directory."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes()
            if b"tuning.exploration" in words and str(mesh.directory).encode() in words:
                found.add(int(path.parent.name))
    return found


async def begun(http: aiohttp.ClientSession, mesh: Mesh, path: str) -> dict[str, Any]:
    """Begin a tuning, and hold its exploration where it is, so that it does not end by itself."""
    others = explorations(mesh)
    status, told = await call(http, "POST", f"{path}/tune", {"recall": 0.9, "plan_only": True})
    assert (status, told["state"]) == (202, "asked")
    for process in await until(lambda: explorations(mesh) - others, "an exploration"):
        os.kill(process, signal.SIGSTOP)
    return await tuning(http, path)


async def test_a_tuning_is_taken_up_where_its_shard_went_and_can_be_cancelled() -> None:
    """The process that the first shard moved to goes on; a cancelled tuning leaves no files, and another may begin."""
    mesh = Mesh()
    try:
        mesh.add("vector_search", "1").ports()
        async with aiohttp.ClientSession(mesh.url) as http, asyncio.timeout(150):

            async def both() -> bool:
                body = {"name": "both", "model": None, "dimension": DIMENSION, "replicas": 2}
                return bool((await call(http, "POST", "/v1/collections", body))[0] == 201)

            await until(both)
            path = await filled(http, "moved", ROWS, shards=1)
            before = await begun(http, mesh, path)
            held = explorations(mesh)
            status, told = await call(
                http, "POST", f"{path}/shards/0/move", {"from": before["tuner"]}
            )
            assert status == 200, told

            async def taken_up() -> bool:
                now = await tuning(http, path)
                return bool(now["id"] == before["id"] and now["tuner"] != before["tuner"])

            await until(taken_up)
            await until(lambda: not explorations(mesh) & held, "the first exploration ends")
            status, told = await call(http, "POST", f"{path}/tune", {})
            assert (status, told["error"]["code"]) == (409, "tuning_under_way")
            for _ in range(2):
                status, told = await call(http, "DELETE", f"{path}/tune")
                assert (status, told["id"], told["state"]) == (200, before["id"], "cancelled")
            await until(lambda: not explorations(mesh), "the second exploration ends")
            assert (await begun(http, mesh, path))["id"] != before["id"]
            status, told = await call(http, "DELETE", f"{path}/tune")
            assert (status, told["state"], told["in_force"]) == (200, "cancelled", None)
            await until(lambda: not explorations(mesh), "the third exploration ends")
            await until(lambda: not list(mesh.directory.glob("**/tuning/*")), "the files are gone")
            status, told = await call(http, "GET", f"{path}/explain")
            assert (status, told["shards"][0]["kind"]) == (200, "exact")
    finally:
        mesh.close()


def test_the_command_explores_without_building(
    mesh: Mesh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints the steps, the front and the plan; with bounds that cannot be met it says what would be needed."""
    monkeypatch.setenv("SPILLWAY_URL", mesh.url)

    async def made(name: str, rows: int) -> None:
        async with aiohttp.ClientSession(mesh.url) as http:
            await filled(http, name, rows)

    asyncio.run(made("plan-only", 1200))
    assert main(["tune", "plan-only", "--recall", "0.8", "--plan-only"]) == 0
    shown = capsys.readouterr().out
    for part in ("calibrated", "settings explored", "plan: ", "predicted", "--plan-only", "note: "):
        assert part in shown
    assert main(["tune", "plan-only", "--watch", "--json"]) == 0
    assert '"in_force": null' in capsys.readouterr().out
    assert main(["tune", "plan-only", "--p99", "1us", "--plan-only"]) == 1
    assert "needed: a p99 of" in capsys.readouterr().out

    assert main(["tune", "plan-only", "--cancel"]) == 1  # it has ended
    assert "needed: a p99 of" in capsys.readouterr().out
    asyncio.run(made("few", 50))
    assert main(["tune", "few"]) == 1
    assert "50 vectors are too few to tune by" in capsys.readouterr().out
    assert main(["tune", "nothing-there"]) == 1
    for words in (["--recall", "1.5"], ["--recall", "0"], ["--p99", "5"], ["--memory", "lots"]):
        assert main(["tune", "few", *words]) == 2
    assert "expected" in capsys.readouterr().err
