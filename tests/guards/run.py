"""Runs every guard: `make guards ARGS="--against PATH [--quick] [--only tests F1A R1]"`.

The tests of this folder, a minute of steady overload, 20 kills of F1A, and R1, E2, P1 and C1 in pairs against another
checkout: a row passes if the median of its pairs is at least 0.98. R1 and E2 run as whole benchmarks one after the
other, P1 and C1 as short blocks of load with both checkouts up. A quiet machine needs two hours; --quick tries whether
the guards themselves work, with 12 s of overload, 2 kills and 2 short pairs a row whose figures nobody should quote.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from tests.guards import overload, pairs, side_by_side
from tests.guards.checkout import ROOT, Checkout

TESTS, OVERLOAD, KILLS = "tests", "overload", "F1A"
GUARDS = (TESTS, OVERLOAD, KILLS, *pairs.ROWS, *side_by_side.LOADS)
BLOCK_S, QUICK_BLOCK_S = 15.0, 4.0
OVERLOAD_S, QUICK_OVERLOAD_S = 60.0, 12.0


def tests() -> bool:
    """Run the tests of this folder."""
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def overloads(*, quick: bool) -> bool:
    """Send texts at twice the rate that the encoders are capable of."""
    found = overload.run(QUICK_OVERLOAD_S if quick else OVERLOAD_S)
    missed = found.missed()
    print(f"{OVERLOAD}: {found}, missed: {', '.join(missed) or 'nothing'}", flush=True)
    return not missed


def kills(count: int, *, quick: bool) -> bool:
    """Kill a process of a loaded mesh so many times."""
    flags = ("--count", str(count), *(pairs.QUICK if quick else ()))
    missed = pairs.missed(pairs.measure(Checkout(), KILLS, flags))
    print(f"{KILLS}: {count} kills, missed: {', '.join(missed) or 'nothing'}", flush=True)
    return not missed


def row(name: str, against: Path, count: int, *, quick: bool) -> bool:
    """Measure a row in pairs, each printed as it comes."""
    ours, theirs, ratios = Checkout(), Checkout(against), list[float]()
    if name in pairs.ROWS:
        found = pairs.compare(name, ours, theirs, count, quick=quick)
    else:
        seconds = QUICK_BLOCK_S if quick else BLOCK_S
        found = side_by_side.compare(name, ours, theirs, count, seconds=seconds)
    for ratio in found:
        ratios.append(ratio)
        print(f"{name}: pair {len(ratios)} of {count}: {ratio:.3f}", flush=True)
    low, high = pairs.interval(ratios)
    word = "passes" if pairs.passes(ratios) else "is slower"
    median = statistics.median(ratios)
    print(f"{name}: {median:.3f} [{low:.3f}, {high:.3f}], {word}", flush=True)
    return pairs.passes(ratios)


def main() -> int:
    """Run the guards that are asked for; 1 if one fails."""
    parser = argparse.ArgumentParser("python -m tests.guards.run", description=__doc__)
    parser.add_argument("--against", type=Path, help="the checkout to be compared with")
    parser.add_argument("--only", nargs="+", choices=GUARDS, default=GUARDS, help="these guards")
    parser.add_argument("--pairs", type=int, help="pairs a row (default 10; quick: 2)")
    parser.add_argument("--kills", type=int, help="kills of F1A (default 20; quick: 2)")
    parser.add_argument("--quick", action="store_true", help="only try the guards")
    args = parser.parse_args()
    rows = [name for name in args.only if name not in {TESTS, OVERLOAD, KILLS}]
    if rows and args.against is None:
        parser.error(f"{', '.join(rows)} need --against PATH")
    failed = []
    for name in args.only:
        if name == TESTS:
            good = tests()
        elif name == OVERLOAD:
            good = overloads(quick=args.quick)
        elif name == KILLS:
            good = kills(args.kills or (2 if args.quick else 20), quick=args.quick)
        else:
            good = row(
                name, args.against, args.pairs or (2 if args.quick else 10), quick=args.quick
            )
        if not good:
            failed.append(name)
    print(f"guards failed: {', '.join(failed)}" if failed else "all guards passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
