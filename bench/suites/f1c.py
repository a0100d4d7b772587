"""F1 for chat: kill -9 of any process under streams, conversations and grounded questions."""

from __future__ import annotations

from bench.document import BenchOptions, Body
from bench.suites import f1
from chaos.f1 import Plan, Result, measure
from chaos.scenes import CHAT
from chaos.stages import HELD, Stage, Stages
from loadgen import stats

# Of the sequences compared, so many may part where the undisturbed run had no clear choice.
MAY_PART = 0.001


def run(options: BenchOptions) -> Body:
    """Kill every process `count` times (15: 120 kills; quick: 1, simulated), then routers between stages."""
    kills = options.rounds(15, 1)
    plan = Plan(CHAT, kills, options.seed, simulated=options.quick, between=max(1, kills * 2 // 3))
    return describe(measure(plan, options), plan)


def describe(result: Result, plan: Plan) -> Body:
    """Turn a result into F1's tables, and what became of equality."""
    body = f1.describe(result, plan)
    equality(body, result)
    between = result.stages
    columns = ["router killed in stage", "times", "right answers", "answered after, median (s)"]
    rows = [_row(between, stage) for stage in HELD]
    body.table("Grounded requests whose router was killed between their stages", columns, rows)
    if between.kills:
        body.met["grounded between stages"] = "missed" if between.wrong else "goal"
    return body


def equality(body: Body, result: Result) -> None:
    """Note how many answers differ from the undisturbed run's, and whether they may."""
    allowed = [each for each in result.differences if each.allowed]
    body.notes.append(
        f"{result.sequences} answers compared with the undisturbed run, greedy and drawn: {len(allowed)} part from "
        f"it at a token whose top-2 gap was below 1e-3, {len(result.differences) - len(allowed)} elsewhere."
    )
    body.notes.append(
        "Every fourth session is deleted with proof, which reads all of Redis: that is checked, and not timed."
    )
    body.notes += [
        f"parts: {each.key} at byte {each.at}, gap {each.gap:.2g}" for each in allowed[:10]
    ]
    parted = len(allowed) > MAY_PART * max(1, result.sequences)
    if parted or len(result.differences) > len(allowed):
        body.met["equality"] = "missed"
    else:
        body.met["equality"] = "must" if allowed else "goal"


def _row(between: Stages, stage: Stage) -> list[str]:
    kills = [kill for kill in between.kills if kill.stage == stage]
    right = sum(kill.outcome == "ok" for kill in kills)
    median = stats.percentiles([kill.answered_s for kill in kills]).get("p50", 0.0)
    return [stage, str(len(kills)), str(right), f"{median:.2f}"]
