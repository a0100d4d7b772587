"""R1 for chat: a thousand streams open at once, none of which may fail."""

from __future__ import annotations

import asyncio
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from loadgen import stats
from loadgen.chat.answer import StreamedAnswer
from loadgen.chat.client import Chat

STREAMS = 1000
# Long enough that the first stream still runs when the last has begun.
TOKENS = 100
STEP_S = 0.1
# More than some 256 at one instant are told to come back in a second, by the pool that parses them.
RATE = 250.0


def run(options: BenchOptions) -> Body:
    """Open all streams and read them to their end (3 times; quick: 50 streams, once)."""
    count = options.pick(STREAMS, 50)
    body = Body(notes=[f"Simulated device: at least {STEP_S * 1e3:.0f} ms a step."])
    rows, failed, peak = [], 0, count
    for number in range(options.rounds(3, 1)):
        with tempfile.TemporaryDirectory(prefix="spillway-r1c-") as folder:
            crowd = asyncio.run(_crowd(Path(folder), count))
        rows.append(_row(count, crowd))
        failed += len(crowd.answers) - crowd.whole
        peak = min(peak, crowd.peak)
        body.samples[f"run {number}"] = {
            "ttft_s": crowd.ttft_s, "itl_s": crowd.itl_s[::17], "cpu_s": crowd.cpu_s,
        }  # fmt: skip
        body.notes += [f"FAILED: {line}" for line in crowd.failures[:5]]
        used = ", ".join(f"{name} {value:.1f}" for name, value in crowd.cpu_s.items())
        body.notes.append(f"CPU seconds: {used}.")
    columns = ["streams", "most in mid-stream at once", "whole", "failed", "TTFT p50 (s)"]
    columns += ["TTFT p99 (s)", "ITL p50 (ms)", "ITL p99 (ms)", "tokens/s", "all over after (s)"]
    title = f"Streams of {TOKENS} tokens, {RATE:.0f} a second asked for of one router"
    body.table(title, columns, rows)
    body.met[f"no failure of {count} open streams"] = "missed" if failed else "goal"
    body.met[f"{count} in mid-stream at once"] = "missed" if peak < count else "goal"
    return body


class Crowd:
    """What became of so many streams."""

    def __init__(self) -> None:
        self.answers: list[StreamedAnswer] = []
        self.ttft_s: list[float] = []
        self.cpu_s: dict[str, float] = {}
        self.seconds = 0.0

    @property
    def whole(self) -> int:
        """Return how many streams were right to their end."""
        return sum(a.ok and a.output_tokens == TOKENS for a in self.answers)

    @property
    def failures(self) -> list[str]:
        """Return what was wrong with the others."""
        return [f"{a.status} {a.code} {a.message} {a.wrong[:1]}" for a in self.answers if not a.ok]

    @property
    def itl_s(self) -> list[float]:
        """Return every gap between two pieces."""
        return [b - a for answer in self.answers for a, b in pairwise(answer.at_s)]

    @property
    def peak(self) -> int:
        """Return how many were between their first and their last piece at one moment, at most."""
        edges = [(a.at_s[0], 1) for a in self.answers if a.at_s]
        edges += [(a.at_s[-1], -1) for a in self.answers if a.at_s]
        most = now = 0
        for _, change in sorted(edges):
            now += change
            most = max(most, now)
        return most


async def _crowd(folder: Path, count: int) -> Crowd:
    found = Crowd()
    device = ("--device", "sim", "--beta", str(STEP_S))
    worker = processes.chat_worker(
        "gpu_worker", *device, MAX_RUNNING=str(count), STEP_TOKENS="65536", CHAT_SLO_S="600"
    )
    async with LocalMesh(folder, [processes.router(), worker]) as mesh:
        async with Chat(mesh.urls, timeout_s=400) as chat:
            await chat.ask(_body(0))
            before = mesh.cpu_seconds()
            began = time.monotonic()
            asked = [_ask(chat, number) for number in range(count)]
            found.answers = list(await asyncio.gather(*asked))
            found.seconds = time.monotonic() - began
        found.cpu_s = {name: value - before[name] for name, value in mesh.cpu_seconds().items()}
    found.ttft_s = [
        answer.at_s[0] - began - number / RATE
        for number, answer in enumerate(found.answers)
        if answer.at_s
    ]
    return found


async def _ask(chat: Chat, number: int) -> StreamedAnswer:
    await asyncio.sleep(number / RATE)
    return await chat.ask(_body(number))


def _body(number: int) -> dict[str, object]:
    message = {"role": "user", "content": f"question number {number}"}
    length = {"max_completion_tokens": TOKENS, "min_tokens": TOKENS}
    return {"messages": [message], "temperature": 0.0, **length}


def _row(count: int, crowd: Crowd) -> list[str]:
    ttft, itl = stats.percentiles(crowd.ttft_s), stats.percentiles(crowd.itl_s)
    tokens = sum(answer.output_tokens for answer in crowd.answers) / crowd.seconds
    return [
        str(count), str(crowd.peak), str(crowd.whole), str(count - crowd.whole),
        *(f"{ttft[key]:.2f}" if ttft else "-" for key in ("p50", "p99")),
        *(f"{itl[key] * 1e3:.0f}" if itl else "-" for key in ("p50", "p99")),
        f"{tokens:.0f}", f"{crowd.seconds:.1f}",
    ]  # fmt: skip
