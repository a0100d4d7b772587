"""F1 for conversations whose pages are in every tier: exact mode, and every transcript is the undisturbed run's."""

from __future__ import annotations

from bench.document import BenchOptions, Body
from bench.suites import f1
from chaos import tiers
from chaos.f1 import Plan, Result, measure
from chaos.scenes import CONVERSATIONS

CLIENTS = 6  # of conversations, so that five are open nearly always


def run(options: BenchOptions) -> Body:
    """Kill each of two workers, kv_store and both Redis `count` times (20: 100 kills; quick: 1)."""
    kills = options.rounds(20, 1)
    plan = Plan(CONVERSATIONS, kills, options.seed, clients_a_kind=CLIENTS)
    return describe(measure(plan, options), plan)


def describe(result: Result, plan: Plan) -> Body:
    """Turn a result into F1's table, what became of equality, and what was found in which tier."""
    body = f1.describe(result, plan)
    body.table("Pages found and moved in the run", *tiers.table(result.tiers))
    body.notes.append(
        f"{result.sequences} turns of conversations compared with the undisturbed run, greedy and drawn, in exact "
        f"mode: {len(result.differences)} differ. Tiers as small as a fault run needs: "
        + ", ".join(f"{key} {value}" for key, value in tiers.SMALL.items())
        + "."
    )
    body.met["equality"] = "missed" if result.differences else "goal"
    read = [f'spillway_pages_found_total{{tier="{tier}"}}' for tier in ("host", "redis", "disk")]
    body.met["every tier was read"] = (
        "goal" if all(result.tiers.get(key) for key in read) else "missed"
    )
    return body
