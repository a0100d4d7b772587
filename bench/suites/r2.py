"""R2: use never exceeds depth at an admission, whatever dies."""

from __future__ import annotations

import msgspec

from bench.document import BenchOptions, Body
from chaos.r2 import ROUTERS, WORKERS, measure


def run(options: BenchOptions) -> Body:
    """Make 1,000,000 admissions (quick: 3,000) while processes are killed and stopped."""
    found = measure(options.rounds(1_000_000, 3_000), options.seed, options.partial)
    body = Body(samples=msgspec.to_builtins(found))
    columns = ["admissions", "over depth", "refusals", "audits of use", "use unlike the streams"]
    row = [found.admitted, len(found.over), found.refused, found.audits, len(found.differ)]
    body.table("", columns, [[f"{value:,}" for value in row]])
    faults = ", ".join(f"{name} {count}" for name, count in sorted(found.faults.items()))
    body.notes.append(
        f"{ROUTERS} routers and {WORKERS} workers as processes, depths changed twice a second; "
        f"done to them: {faults or 'nothing'}; seed {options.seed}."
    )
    body.notes += [f"WRONG: {line}" for line in (found.over + found.differ)[:10]]
    body.met["0 over depth"] = "missed" if found.over or found.differ else "goal"
    return body
