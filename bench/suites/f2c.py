"""F2 for chat: cancelled and abandoned streams stop within one step, and the worker holds nothing for them."""

from __future__ import annotations

from bench.document import BenchOptions, Body
from bench.suites.f2 import describe
from chaos.f2 import CHAT, SLACK_S, measure


def run(options: BenchOptions) -> Body:
    """Stop attached streams by cancel and by disconnect (20 rounds each; quick: 1)."""
    stops = measure(options.rounds(20, 1), CHAT)
    body = describe(stops, CHAT)
    held = [f"{stop.way}: {stop.held}" for stop in stops if stop.held]
    freed = max((stop.freed_s for stop in stops), default=0.0)
    body.notes.append(
        "A third of the streams runs, the others wait. The engine hears of a stop when it tells of a step, while the "
        "next one runs already, so pages are given back within two: here all of them, and every sequence, "
        f"{freed * 1e3:.0f} ms after the stop at the latest."
    )
    body.notes += [f"HELD {line}" for line in held[:5]]
    late = freed > 2 * CHAT.step_s + SLACK_S
    body.met["pages freed within two steps"] = "missed" if held or late else "goal"
    return body
