"""F1 for answers whose passages are found anew while they are written: kill -9 amid their retrievals."""

from __future__ import annotations

from statistics import median

from bench.document import BenchOptions, Body
from bench.suites import f1, f1c
from chaos.f1 import Plan, Result, measure
from chaos.pipelined import INTERVAL, RETRIEVALS, TOKENS
from chaos.scenes import PIPELINED

CLIENTS = 8  # of answers, so that five are amid their retrievals often
MOMENTS = {
    "router": "between two retrievals",
    "vector_search": "during a later retrieval",
    "gpu_worker": "after passages were replaced",
}


def run(options: BenchOptions) -> Body:
    """Kill each of two routers, two workers and vector_search `count` times (20: 100 kills; quick: 1, simulated)."""
    kills = options.rounds(20, 1)
    plan = Plan(PIPELINED, kills, options.seed, simulated=options.quick, clients_a_kind=CLIENTS)
    return describe(measure(plan, options), plan)


def describe(result: Result, plan: Plan) -> Body:
    """Turn a result into F1's tables, at which moments the kills were, and what became of equality."""
    body = f1.describe(result, plan)
    f1c.equality(body, result)
    columns = ["killed", "while answers were", "times", "answers open: fewest / median"]
    rows = []
    for kind, moment in MOMENTS.items():
        met = [kill.open_requests for kill in result.kills if kill.victim.startswith(kind)]
        found = f"{min(met)} / {median(met):.0f}" if met else "-"
        rows.append([kind, moment, str(len(met)), found])
    body.table("Moments of the kills", columns, rows)
    body.notes.append(
        f"Every answer has {TOKENS} tokens and {RETRIEVALS} retrievals, one every {INTERVAL} tokens; text, citations, "
        "passages, and what each retrieval replaced after which token, must be the undisturbed run's. A kill waits "
        f"until {plan.open} answers have had passages replaced and have a retrieval left; vector_search is stopped "
        "before its kill, until a search of a later retrieval waits for it."
    )
    return body
