"""The command line every fault run shares: `python -m chaos.<id> --kills N --seed S --json FILE`.

With `--chat` it is the same row for chat, where there is one; with `--all` for everything at once, with `--pages` for
conversations whose pages are in every tier, with `--pipelined` for answers whose passages are found anew.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bench import cli, document
from bench.document import BenchOptions
from bench.suite import SUITES

LEFT = 3


def main(identifier: str, argv: list[str]) -> int:
    """Run one fault suite: 0 every promise was kept, 1 not, 3 kept so far and the same command goes on."""
    suite = SUITES[identifier]
    parser = argparse.ArgumentParser(
        f"python -m chaos.{identifier.lower()}", description=suite.title
    )
    parser.add_argument("--kills", type=int, help="kills or rounds; default: the row's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here; FILE.partial resumes")
    parser.add_argument(
        "--minutes", type=float, help="kill for so long, then stop; the same command goes on"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run with simulated devices")
    which = parser.add_mutually_exclusive_group()
    for flag, letter, rows in (
        ("--chat", "C", "F1C, F2C, F4C"),
        ("--all", "A", "F1A"),
        ("--pages", "P", "F1P"),
        ("--pipelined", "R", "F1R"),
    ):
        about = f"the row for {flag[2:]}: {rows}"
        which.add_argument(
            flag, dest="row", action="store_const", const=letter, default="", help=about
        )
    args = parser.parse_args(argv)
    if identifier + args.row not in SUITES:
        parser.error(f"{identifier} has no such row")
    identifier += args.row
    suite = SUITES[identifier]
    partial = args.json.with_suffix(".partial") if args.json else None
    options = BenchOptions(
        quick=args.quick, seed=args.seed, count=args.kills, partial=partial, minutes=args.minutes
    )
    print(f"{identifier}: seed {args.seed}", flush=True)
    body = importlib.import_module(suite.module).run(options)
    found = document.build(identifier, suite.title, body, options, document.origin())
    if args.json:
        document.save(args.json, found)
    cli.show(found)
    if body.left:
        print(f"{body.left} kills are left: the same command goes on")
    elif partial is not None:
        partial.unlink(missing_ok=True)
    if "missed" in body.met.values():
        return 1
    return LEFT if body.left else 0
