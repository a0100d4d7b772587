"""F1: kill -9 of any process under load; nothing accepted is lost, and recovery is in time."""

from __future__ import annotations

from statistics import median

import msgspec

from bench.document import BenchOptions, Body
from chaos.f1 import BESIDE_S, OPEN, RECOVER_S, Kill, Plan, Result, measure


def run(options: BenchOptions) -> Body:
    """Kill every process `count` times (20; quick: 1, with simulated devices)."""
    kills = options.rounds(20, 1)
    plan = Plan(kills=kills, seed=options.seed, simulated=options.quick, overlap=False)
    return describe(measure(plan, options), plan)


def describe(result: Result, plan: Plan) -> Body:
    """Turn a result into tables, samples and verdicts."""
    body = Body(samples=msgspec.to_builtins(result))
    rows = [
        _row(name, [k for k in result.kills if k.victim == name]) for name in plan.scene.victims
    ]
    columns = [
        "killed",
        "times",
        "requests open at a kill: fewest / median",
        "process ready again",
        "first answer",
    ]
    columns += ["open requests ended: median", "slowest", "goal", "allowed for the slowest"]
    body.table("Recovery in seconds after the kill", columns, rows)
    operations = ", ".join(f"{count} {kind}" for kind, count in sorted(result.operations.items()))
    body.notes.append(
        f"{sum(result.operations.values())} operations ({operations}) in {result.tries} tries; "
        f"{len(result.wrong)} wrong, lost, doubled or failed; seed {plan.seed}."
    )
    body.notes.append(
        f"Allowed: {RECOVER_S:g} s where another process of the kind lives, else {RECOVER_S:g} s + that restart's own "
        f"start + 1 s; the goal is {BESIDE_S:g} s where another worker of the lane lives on the machine. A kill waits "
        f"until {plan.open} clients wait for an answer; a request is open until its client has all of it."
    )
    again = ", ".join(f"{count} {why}" for why, count in sorted(result.repeated.items()))
    body.notes.append(
        f"Tried again, under the same key and at the next router, after: {again or '-'}."
    )
    if result.pieces:
        pieces = "one piece" if result.pieces == 1 else f"{result.pieces} pieces"
        body.notes.append(f"Done in {pieces}, {result.seconds / 60:.0f} minutes.")
    if plan.simulated:
        body.notes.append("Simulated devices.")
    body.left = len(plan.order()) - len(result.kills)
    body.notes += [f"WRONG: {line}" for line in result.wrong[:10]]
    body.met["nothing lost, doubled or changed"] = "missed" if result.wrong else "goal"
    body.met["recovery in time"] = _recovered(result)
    fewest = min((kill.open_requests for kill in result.kills), default=0)
    body.met[f"{OPEN} open requests at every kill"] = "goal" if fewest >= OPEN else "missed"
    return body


def _recovered(result: Result) -> str:
    if result.late:
        return "missed"
    return "must" if any(kill.healed_s > kill.goal_s > 0 for kill in result.kills) else "goal"


def _row(name: str, kills: list[Kill]) -> list[str]:
    if not kills:
        return [name, "0", *["-"] * 7]
    worst = max(kills, key=lambda kill: kill.healed_s - kill.limit_s)
    opened = [kill.open_requests for kill in kills]
    return [
        name,
        str(len(kills)),
        f"{min(opened)} / {median(opened):.0f}",
        f"{median(kill.ready_s for kill in kills):.2f}",
        f"{median(kill.first_ok_s for kill in kills):.2f}",
        f"{median(kill.healed_s for kill in kills):.2f}",
        f"{worst.healed_s:.2f}",
        f"{worst.goal_s:.2f}",
        f"{worst.limit_s:.2f}",
    ]
