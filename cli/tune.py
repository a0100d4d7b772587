"""`spillway tune COLLECTION --recall 0.95`: find the best index for a recall goal, build it, and prove its recall."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from spillway_client import AsyncSpillway, Tuning

from cli.http import add_server, say, talk
from cli.terminal import printable
from common.wire.tuning import ENDED

_LOOK_S = 1.0
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "tune",
        help="find the best index for a recall goal, and build it",
        description="Explore kinds of index and their parameters on a sample of the collection, beside its traffic,"
        " predict what each does, build the best, and prove its recall by queries that the exploration did not see."
        " Searches go by the old index until then, and for good if that fails. Ctrl-C ends what is shown; the tuning"
        " goes on: --watch shows it again, --cancel ends it.",
    )
    parser.add_argument("collection")
    parser.add_argument(
        "--recall", type=float, default=0.95, help="share of the true neighbours to find (0.95)"
    )
    parser.add_argument("--p99", help="what 99 of 100 single searches may take, e.g. 5ms")
    parser.add_argument("--memory", help="what one shard may hold in memory, e.g. 2GB")
    parser.add_argument("--plan-only", action="store_true", help="explore without building")
    parser.add_argument(
        "--watch", action="store_true", help="show the tuning that was begun last; begin none"
    )
    parser.add_argument(
        "--cancel",
        action="store_true",
        help="end the tuning that goes on, and leave the index that there is; begin none",
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Begin a tuning, and print its steps and its results; or cancel one. 1 if it ended in another way."""
    try:
        if not 0 < args.recall <= 1:
            raise ValueError(f"--recall is {args.recall:g}: expected more than 0 and at most 1")
        p99_s = amount(args.p99, _SECONDS, "--p99", "5ms")
        memory = amount(args.memory, _BYTES, "--memory", "2GB")
    except ValueError as error:
        return say(str(error), 2)
    return talk(args, lambda client: _tune(client, args, p99_s, memory))


def amount(given: str | None, units: Mapping[str, float], name: str, example: str) -> float | None:
    """Return a number with a unit, given as text, as a number; None for None, ValueError for other text."""
    if given is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", given.strip())
    if found is None or found[2] not in units or not float(found[1]):
        raise ValueError(f"{name} is {given!r}: expected a number and its unit, such as {example}")
    return float(found[1]) * units[found[2]]


async def _tune(
    client: AsyncSpillway, args: argparse.Namespace, p99_s: float | None, memory: float | None
) -> int:
    collections, name = client.collections, args.collection
    if args.cancel:
        now = await collections.cancel_tuning(name)
    elif args.watch:
        now = await collections.tuning(name)
    else:
        now = await collections.tune(
            name,
            recall=args.recall,
            p99_ms=None if p99_s is None else 1000 * p99_s,
            memory_bytes=None if memory is None else int(memory),
            plan_only=args.plan_only,
        )
    told = 0
    while True:
        for step in [] if args.json else now.steps[told:]:
            print(printable(step), flush=True)
        told = len(now.steps)
        if now.state in ENDED:
            break
        await asyncio.sleep(_LOOK_S)
        now = await collections.tuning(name)
    if args.json:
        print(json.dumps(dataclasses.asdict(now), ensure_ascii=False, indent=2))
    else:
        for line in lines(now):
            print(printable(line))
    return 0 if now.state == ("cancelled" if args.cancel else "done") else 1


def lines(found: Tuning) -> Iterator[str]:
    """Yield a tuning's results: the front as a table, the plan, and its predicted and measured figures."""
    if found.front:
        yield f"{found.explored:,} settings explored; no other one beats these:"
        head = ("recall", "searches/s", "p99 ms", "MiB")
        yield "  " + "  ".join(f"{each:>10}" for each in head) + "  setting"
        for each in found.front:
            mark = "*" if each == found.chosen else " "
            yield f"{mark} {_numbers(each)}  {setting(each['setting'])}" + (
                f"  ({each['why']})" if each["why"] else ""
            )
    for note in found.notes:
        yield f"note: {note}"
    if found.chosen is not None:
        yield f"plan: {setting(found.chosen['setting'])}"
        yield f"  predicted {_numbers(found.chosen)}"
    if found.measured is not None:
        measured = found.measured
        yield f"  measured  {_numbers(measured)}"
        yield (
            f"  recall {measured['recall']:.4f} +- {measured['error']:.4f} by {measured['queries']} queries that "
            f"tuning had not seen; effort {measured['effort']}"
        )
    if found.state == "failed":
        yield f"failed: {found.why}; searches go by the index that there was"
    elif found.state == "cancelled":
        yield "cancelled; searches go by the index that there was"
    elif found.plan_only:
        yield "nothing was built, as --plan-only asks"


def setting(each: Mapping[str, Any]) -> str:
    """Return a setting in words."""
    threads = f", {each['threads']} threads"
    if each["kind"] == "graph":
        return f"graph: M {each['links']}, ef {each['effort']}{threads}"
    if each["kind"] == "ivfpq":
        coded = f"{each['code_bits']} bits{', OPQ' if each['rotate'] else ''}"
        read = f"nlist {each['lists']}, nprobe {each['effort']}, depth {each['depth']}"
        return f"ivfpq: {read}, {coded}{threads}"
    return "exact"


def _numbers(each: Mapping[str, Any]) -> str:
    size = each["bytes"] / (1 << 20)
    return f"{each['recall']:>10.4f}  {each['qps']:>10,.0f}  {1000 * each['p99_s']:>10.3f}  {size:>10,.1f}"
