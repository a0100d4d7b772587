"""F3: a hung worker of each kind; requests to others keep their p99, its own jobs are reclaimed."""

from __future__ import annotations

import msgspec

from bench.document import BenchOptions, Body
from chaos.f3 import ENDED_S, RATES, VICTIMS, Round, Victim, measure
from loadgen import stats

ROUNDS, SECONDS = 18, 12.0  # 2,000 requests of the rarest kind on either side


def run(options: BenchOptions) -> Body:
    """Stop each kind of worker in rounds of a calm block and one with it stopped (18 of 12 s; quick: 1 of 7 s)."""
    rounds, left = measure(options.rounds(ROUNDS, 1), 7.0 if options.quick else SECONDS, options)
    return describe(rounds, left)


def describe(rounds: list[Round], left: int = 0) -> Body:
    """Turn rounds into tables, samples and verdicts."""
    body = Body(samples={"rounds": msgspec.to_builtins(rounds)}, left=left)
    body.notes.append(
        f"Simulated devices; {', '.join(f'{rate:g} {kind}' for kind, rate in RATES.items())} requests a second at "
        "random moments. Two encoders, two generators (whose processes encode, too), the CPU worker, vector_search, "
        "kv_store, one router. Every other round begins with the stopped block."
    )
    others, own = list[list[str]](), list[list[str]]()
    for victim in VICTIMS:
        of_it = [each for each in rounds if each.victim == victim.name]
        if of_it:
            others += _others(body, victim, of_it)
            own.append(_own(body, victim, of_it))
    columns = ["stopped", "requests", "calm: count", "p50", "p99", "stopped: count", "p50", "p99"]
    body.table("Requests to others, ms", [*columns, "p99 / p99 calm [95 %]"], others)
    columns = ["stopped", "requests it had", "longest to its answer, s", "allowed", "refused"]
    columns.append("failed")
    body.table("Requests that the stopped worker had", columns, own)
    body.notes.append(
        "A stopped worker had what was sent before it stopped, or within a second after, and took longer than a lease; "
        "the only worker of its kind had all of that kind that was accepted, and answers once it goes on. Once its "
        "heartbeat has lapsed, more of that kind is refused at the door with 503."
    )
    return body


def _others(body: Body, victim: Victim, rounds: list[Round]) -> list[list[str]]:
    rows = []
    for kind in RATES:
        if victim.alone and kind in victim.works:
            continue
        calm = [value for each in rounds for value in each.calm.others_s.get(kind, ())]
        hung = [value for each in rounds for value in each.hung.others_s.get(kind, ())]
        ratio = stats.ratio_of(hung, calm, 99.0)
        said = f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        rows.append([victim.name, kind, *_cells(calm), *_cells(hung), said])
        word = stats.verdict(ratio, 1.05, 1.20, higher=False, width=stats.TAIL)
        body.met[f"{victim.name} stopped: p99 of {kind}"] = word
    return rows


def _own(body: Body, victim: Victim, rounds: list[Round]) -> list[str]:
    taken = [value for each in rounds for some in each.hung.taken_s.values() for value in some]
    failed = sum(
        count for each in rounds for b in (each.calm, each.hung) for count in b.failed.values()
    )
    # Nobody stands in for the only one of its kind: its jobs wait until it goes on.
    allowed = ENDED_S + (max(each.seconds for each in rounds) if victim.alone else 0.0)
    late = [value for value in taken if value > allowed]
    body.met[f"{victim.name} stopped: its jobs"] = "missed" if late or failed else "goal"
    longest = f"{max(taken):.2f}" if taken else "-"
    refused = sum(count for each in rounds for count in each.hung.refused.values())
    return [victim.name, str(len(taken)), longest, f"{allowed:g}", str(refused), str(failed)]


def _cells(values: list[float]) -> list[str]:
    found = stats.percentiles(values)
    return [str(len(values)), *(f"{found[key] * 1e3:.1f}" for key in ("p50", "p99"))]
