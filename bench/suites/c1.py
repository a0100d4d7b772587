"""C1: chat under open-loop load: single turns, conversations by session, and the same without sessions."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from loadgen import arrivals
from loadgen.chat.cli import sample
from loadgen.chat.client import Chat
from loadgen.chat.load import Asking, ChatLoad, Talk
from loadgen.chat.replies import Goal
from loadgen.chat.scripts import Lengths, ScriptShape, scripts
from loadgen.target import Target

GOAL = Goal(ttft_s=1.0, tpot_s=0.1)
# ShareGPT's means where the shipped model's context and these minutes allow: its pauses of 60 s do not fit.
SINGLE = ScriptShape(Lengths(38.0, limit=400), Lengths(60.0, limit=300), turns=1.0)
TALK = ScriptShape(
    Lengths(20.0, limit=100), Lengths(40.0, limit=120), turns=4.0, think_s=2.0, max_turns=8
)
RUNS: tuple[tuple[str, ScriptShape, Asking, float], ...] = (
    ("single turns", SINGLE, Asking(), 0.5),
    ("single turns", SINGLE, Asking(), 1.0),
    ("single turns", SINGLE, Asking(), 2.0),
    ("conversations, by session", TALK, Asking("session"), 0.25),
    ("conversations, whole history sent", TALK, Asking("stateless"), 0.25),
)


def run(options: BenchOptions) -> Body:
    """Load one router and one worker with the shipped model (60 s a row; quick: 3 s)."""
    body = Body()
    with tempfile.TemporaryDirectory(prefix="spillway-c1-") as folder:
        rows = asyncio.run(_rows(body, options, Path(folder)))
    columns = ["load", "begun a second", "requests", "failed", "prompt tokens", "of them cached"]
    columns += ["output tokens/s", "TTFT p50 / p99 (ms)", "TPOT p50 / p99 (ms)"]
    columns += ["ITL p50 / p99 (ms)", "latency/token p90 (ms)", "goodput/s", "within the goal"]
    body.table("The shipped model on the CPU, Poisson arrivals", columns, rows)
    body.notes.append(
        f"Goodput: whole answers with TTFT within {GOAL.ttft_s:g} s and TPOT within {GOAL.tpot_s * 1e3:.0f} ms. "
        "Lengths are log-normal, greedy answers of exactly the length drawn."
    )
    return body


async def _rows(body: Body, options: BenchOptions, folder: Path) -> list[list[str]]:
    seconds = float(options.rounds(60, 3))
    services = [processes.router(), processes.chat_worker("gpu_worker", "--device", "cpu")]
    rows, failed = [], 0
    async with LocalMesh(folder, [*services, processes.kv_store()]) as mesh:
        for number, (name, shape, asking, rate) in enumerate(RUNS):
            talk = await _load(mesh, shape, asking, rate, seconds, options.seed + number)
            found = talk.summary(GOAL)
            failed += found["requests"] - found["ok"]
            rows.append(_row(name, rate, found))
            body.samples[f"{number}: {name}, {rate:g}/s"] = [sample(each) for each in talk.replies]
            if found["codes"]:
                body.notes.append(f"{name}, {rate:g}/s: {found['codes']}")
    body.met["no failure"] = "missed" if failed else "goal"
    return rows


async def _load(
    mesh: LocalMesh, shape: ScriptShape, asking: Asking, rate: float, seconds: float, seed: int
) -> Talk:
    async with Chat(mesh.urls) as chat, Target(mesh.urls) as target:
        load = ChatLoad(chat, target, scripts(shape, seed), asking)
        await load.closed(1, count=1)
        return await load.open(arrivals.poisson(rate, random.Random(seed)), seconds)


def _row(name: str, rate: float, found: dict[str, Any]) -> list[str]:
    return [
        name, f"{rate:g}", str(found["requests"]), str(found["requests"] - found["ok"]),
        str(found["prompt_tokens"]), str(found["cached_tokens"]),
        f"{found['output_tokens_per_s']:.0f}",
        *(_two(found[key]) for key in ("ttft_s", "tpot_s", "itl_s")),
        f"{found['normalized_s']['p90'] * 1e3:.1f}" if found["normalized_s"] else "-",
        f"{found['goodput_per_s']:.2f}", f"{found['within_goal'] * 100:.1f} %",
    ]  # fmt: skip


def _two(found: dict[str, float]) -> str:
    return f"{found['p50'] * 1e3:.1f} / {found['p99'] * 1e3:.1f}" if found else "-"
