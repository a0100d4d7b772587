"""F1 for everything at once: kill -9 of any process under chat, grounded questions, embeddings, searches and ingest."""

from __future__ import annotations

from bench.document import BenchOptions, Body
from bench.suites import f1, f1c
from chaos.f1 import Plan, Result, measure
from chaos.scenes import ALL

# A worker's encoder and generator share its compute thread, a step of each in turn: embeddings that never pause would
# make every token wait for a batch, and long answers would outlast their clients. With two clients a kind, those of
# chat hold six requests open most of the time, so that a kill need not wait long for the five it is to meet.
REST_S, CLIENTS = 1.0, 2


def run(options: BenchOptions) -> Body:
    """Kill 100 times in all, in rounds over all processes (quick: 8, with simulated devices)."""
    total = options.rounds(100, len(ALL.victims))
    plan = Plan(
        ALL,
        seed=options.seed,
        simulated=options.quick,
        clients_a_kind=CLIENTS,
        total=total,
        rest_s=REST_S,
    )
    return describe(measure(plan, options), plan)


def describe(result: Result, plan: Plan) -> Body:
    """Turn a result into F1's table, and what became of equality."""
    body = f1.describe(result, plan)
    f1c.equality(body, result)
    return body
