"""The command line every fault run shares: `python -m loadgen.faults.<id> --kills N --seed S --json FILE`.

With `--chat` it is the same row for chat, where there is one.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from loadgen import cli, document
from loadgen.document import Options
from loadgen.suite import SUITES


def main(identifier: str, argv: list[str]) -> int:
    """Run one fault suite; 0 if every promise was kept, else 1."""
    suite = SUITES[identifier]
    parser = argparse.ArgumentParser(
        f"python -m loadgen.faults.{identifier.lower()}", description=suite.title
    )
    parser.add_argument("--kills", type=int, help="kills a process, or rounds; default: the row's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here; FILE.partial resumes")
    parser.add_argument("--quick", action="store_true", help="a smoke run with simulated devices")
    parser.add_argument("--chat", action="store_true", help="the row for chat: F1C, F2C, F4C")
    args = parser.parse_args(argv)
    if args.chat and f"{identifier}C" not in SUITES:
        parser.error(f"{identifier} has no row for chat")
    identifier = f"{identifier}C" if args.chat else identifier
    suite = SUITES[identifier]
    partial = args.json.with_suffix(".partial") if args.json else None
    options = Options(quick=args.quick, seed=args.seed, count=args.kills, partial=partial)
    print(f"{identifier}: seed {args.seed}", flush=True)
    body = importlib.import_module(suite.module).run(options)
    found = document.build(identifier, suite.title, body, options)
    if args.json:
        document.save(args.json, found)
    if partial is not None:
        partial.unlink(missing_ok=True)
    cli.show(found)
    return 1 if "missed" in body.met.values() else 0
