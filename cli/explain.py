"""`spillway explain COLLECTION|REQUEST`: print how a collection searches, and why; or the timeline of a request."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from spillway_client import AsyncSpillway, ShardExplanation

from cli import timeline
from cli.http import add_server, say, talk
from cli.search import filter_of
from cli.terminal import printable

_REQUEST = "~"  # in every request's id, and in no collection's name


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "explain",
        help="show how a collection searches, and why; or when the stages of a request ran",
        description="Of a collection, show each shard's kind of index with the reason, what each effort finds and"
        " takes, and which way a search with a filter goes. Of a request, by the x-request-id of its answer, show its"
        " stages on one axis of time, or its jobs where it has no stages.",
    )
    parser.add_argument("collection", metavar="COLLECTION|REQUEST")
    parser.add_argument("-k", type=int, default=10, help="how many hits the search wants (10)")
    parser.add_argument("--filter", help='by metadata, e.g. \'{"year": {"$gte": 2020}}\'')
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the server, and print the explanation."""
    try:
        wanted = filter_of(args)
    except ValueError as error:
        return say(str(error), 2)
    return talk(args, lambda client: _explain(client, args, wanted))


async def _explain(client: AsyncSpillway, args: argparse.Namespace, wanted: Any) -> int:
    if _REQUEST in args.collection:
        for line in timeline.lines(await client.requests.timeline(args.collection)):
            print(printable(line))
        return 0
    told = await client.collections.explain(args.collection, k=args.k, filter=wanted)
    for shard in told.shards:
        for line in lines(shard):
            print(printable(line))
    return 0


def lines(shard: ShardExplanation) -> Iterator[str]:
    """Yield a shard's explanation in lines."""
    yield f"shard {shard.shard}: {shard.kind}"
    yield f"  {shard.why}"
    memory = ", ".join(f"{name} {size:,} bytes" for name, size in shard.bytes.items())
    yield f"  {shard.live:,} vectors, {shard.newer:,} newer than the index; in memory: {memory}"
    if shard.coding is not None:
        turned = "rotated" if shard.coding["rotate"] else "not rotated"
        yield f"  codes of {shard.coding['code_bits']} bits, rows {turned}"
    way = f"a search goes by {shard.path}, effort {shard.effort}"
    yield f"  {way}, recall {shard.recall:.3f} (goal {shard.recall_goal})"
    if shard.quantizer:
        yield f"  its lists are of the quantizer {shard.quantizer}"
    yield f"  {'effort':>8}  {'recall':>6}  {'at most ms':>10}  path"
    for rung in shard.efforts:
        recall = "-" if rung.recall is None else f"{rung.recall:.3f}"
        yield f"  {rung.effort:>8}  {recall:>6}  {_ms(rung.predicted_ms):>10}  {rung.path}"
    if shard.filter is not None:
        met = shard.filter
        yield f"  the filter allows {met.matching:,} ({met.selectivity:.2%}), and goes by {met.path}: {met.why}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
