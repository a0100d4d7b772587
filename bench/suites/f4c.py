"""F4 for chat: SIGTERM with 50 streams in flight; none is truncated, and it is unready within 100 ms."""

from __future__ import annotations

from bench.document import BenchOptions, Body
from bench.suites.f4 import add
from chaos.f4 import CHAT, HANDED, measure


def run(options: BenchOptions) -> Body:
    """Drain a router and a worker in mid-stream (10 times each; quick: once), with time to finish and without."""
    rounds = options.rounds(10, 1)
    body = Body(notes=["Simulated devices."])
    add(body, "30 s to drain: the worker finishes its streams", measure(rounds, CHAT))
    add(body, "Workers have 1 s to drain: they hand over", measure(rounds, HANDED))
    body.notes.append(f"Attached streams of {CHAT.tokens} tokens, {CHAT.step_s * 1e3:.0f} ms each.")
    return body
