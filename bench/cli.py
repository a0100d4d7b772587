"""`spillway bench`: measure a row of docs/benchmarks.md, write its JSON, and name rivals that were not measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import all_rows, document, hot_path, suite
from bench.document import RESULTS, BenchOptions
from loadgen.html.page import can_plot


def add(subparsers: Any) -> None:
    """Declare `bench` on the console script's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="measure a row of docs/benchmarks.md", description=__doc__
    )
    parser.add_argument("id", nargs="?", help="the row, such as E1; see --list")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument(
        "--all", action="store_true", help="every row; with --list: how each stands"
    )
    parser.add_argument("--resume", action="store_true", help="with --all: only what is not fresh")
    parser.add_argument("--json", type=Path, help="write the result here; with --all a folder")
    parser.add_argument("--html", type=Path, help="write a report with plots here")
    parser.add_argument("--quick", action="store_true", help="a smoke run, not for quoting")
    parser.add_argument("--setup", action="store_true", help="install the row's rivals, then stop")
    parser.add_argument("--count", type=int, help="pairs, kills or rounds; default: the row's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="measure only cells whose name holds this")
    parser.add_argument(
        "--partial", type=Path, help="keep here what is done; the same command goes on with it"
    )
    parser.add_argument("--minutes", type=float, help="with --partial: begin nothing after so long")
    parser.add_argument(
        "--cgroup",
        type=Path,
        help="limit memory by groups below this cgroup directory: F5, V1M, V6",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 done, 1 a row of all failed, 2 no such row or place, 3 not all measured, 4 something left."""
    if args.all:
        return _all(args)
    if args.list or not args.id:
        for each in suite.SUITES.values():
            print(f"{each.id:4} {each.title}")
        return 0
    identifier = args.id.upper()
    if identifier not in suite.SUITES:
        known = ", ".join(suite.SUITES)
        print(f"no row {args.id!r}; expected one of {known}", file=sys.stderr)
        return 2
    if args.html and not can_plot():
        return 2
    if args.json and (why := _unpublishable(args.json, quick=args.quick)):
        print(why, file=sys.stderr)
        return 2
    options = BenchOptions(
        quick=args.quick, seed=args.seed, count=args.count, partial=args.partial,
        digest=hot_path.hot_path(identifier)["digest"], minutes=args.minutes, only=args.only,
        cgroup=args.cgroup,
    )  # fmt: skip
    if args.setup:
        from bench.rivals import environments  # noqa: PLC0415 - only where something is installed

        return environments.setup(identifier, options.setup_dir)
    found = suite.run(identifier, options)
    if args.json:
        document.save(args.json, found)
    if args.html:
        from bench.figures.html import rows  # noqa: PLC0415 - only reports need what plots need

        rows.page([found], f"Spillway: {identifier}").save(args.html)
    show(found)
    absent = suite.missing(found)
    for name in absent:
        print(f"{name}: not measured (spillway bench {identifier} --setup)", file=sys.stderr)
    if found.get("left"):
        print(f"{found['left']} cells are left: the same command goes on")
        return suite.LEFT
    if args.partial and not args.only:
        args.partial.unlink(missing_ok=True)
    unmeasured = absent or set(found["met"].values()) == {"not measured"}
    return suite.NOT_MEASURED if unmeasured and not options.quick else 0


def _all(args: argparse.Namespace) -> int:
    results = args.json or RESULTS
    place = BenchOptions().setup_dir / ("all-quick" if args.quick else "all")
    plan = all_rows.Plan(results, place, args.resume, args.quick, args.minutes)
    if args.list:
        return all_rows.listed(plan)
    return all_rows.run(plan)


def _unpublishable(path: Path, *, quick: bool) -> str:
    """Say why a run's result may not stand among the published ones; empty if it may, or goes elsewhere."""
    if path.resolve().parent != RESULTS:
        return ""
    if quick:
        return f"{path}: a quick run is not published; expected another place, or no --quick"
    if document.origin().dirty:
        return f"{path}: the code has uncommitted changes; expected a clean tree, or another place"
    return ""


def show(found: dict[str, Any]) -> None:
    """Print a document's tables and verdicts for people."""
    for table in found["tables"]:
        rows = [table["columns"], *table["rows"]]
        widths = [max(len(row[i]) for row in rows) for i in range(len(table["columns"]))]
        print(f"\n{table['title']}" if table["title"] else "")
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    for what, word in found["met"].items():
        print(f"{what}: {word}")
    for note in found["notes"]:
        print(f"- {note}")


def main(argv: list[str] | None = None) -> int:
    """Run `bench` without the console script."""
    parser = argparse.ArgumentParser("python -m bench.cli")
    add(parser.add_subparsers(required=True))
    args = parser.parse_args(["bench", *(sys.argv[1:] if argv is None else argv)])
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
