"""`spillway shards VERB COLLECTION …`: show, split, move, replicate and drop the shards of a collection."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json

from spillway_client import AsyncSpillway, ShardList

from cli.http import add_server, talk
from cli.terminal import printable

_LOOK_S = 1.0


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its verbs."""
    parser = subparsers.add_parser("shards", help="where a collection's shards live")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _verb(verbs, "list", "show the shards, their replicas and what is missing")
    split = _verb(verbs, "split", "split a shard into two halves of its hashes")
    move = _verb(verbs, "move", "move a replica of a shard to another process, or add one")
    drop = _verb(verbs, "drop", "do without a replica that another one stands in for")
    reset = _verb(verbs, "reset", "begin a lost shard anew, empty: what it held is given up")
    replicas = _verb(verbs, "replicas", "set how many replicas each shard has")
    for one in (split, move, drop, reset):
        one.add_argument("shard", type=int)
    move.add_argument(
        "--from", dest="source", help="the replica that leaves (default: one is added)"
    )
    move.add_argument("--to", dest="target", help="the process to fill (default: one is chosen)")
    drop.add_argument("replica")
    reset.add_argument("--yes", action="store_true", help="give up what the shard held")
    replicas.add_argument("count", type=int)
    for one in (split, move, replicas):
        one.add_argument("--wait", action="store_true", help="return when it is done")
    parser.set_defaults(run=run)


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, told: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=told)
    parser.add_argument("collection")
    parser.add_argument("--json", action="store_true", help="print the shards as JSON")
    add_server(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the verb, and print the shards."""
    if args.verb == "reset" and not args.yes:
        print("This gives up what the shard held. Repeat it with --yes to begin the shard anew.")
        return 2
    return talk(args, lambda client: _run(client, args))


async def _run(client: AsyncSpillway, args: argparse.Namespace) -> int:
    found = await _changed(client, args)
    while getattr(args, "wait", False) and not settled(found):
        await asyncio.sleep(_LOOK_S)
        found = await client.collections.shards(args.collection)
    if args.json:
        print(json.dumps(dataclasses.asdict(found), ensure_ascii=False, indent=2))
    else:
        print(show(found))
    return 1 if found.missing else 0


async def _changed(client: AsyncSpillway, args: argparse.Namespace) -> ShardList:
    collections, name = client.collections, args.collection
    if args.verb == "split":
        return await collections.split_shard(name, args.shard)
    if args.verb == "move":
        return await collections.move_shard(
            name, args.shard, source=args.source, target=args.target
        )
    if args.verb == "drop":
        return await collections.drop_replica(name, args.shard, args.replica)
    if args.verb == "reset":
        return await collections.reset_shard(name, args.shard)
    if args.verb == "replicas":
        return await collections.set_replicas(name, args.count)
    return await collections.shards(name)


def settled(found: ShardList) -> bool:
    """Return whether every replica serves and no shard is being split."""
    return all(
        one.split is None and all(each.state == "serving" for each in one.replicas)
        for one in found.data
    )


def show(found: ShardList) -> str:
    """Return the shards as lines: the share of the documents, the sizes, and each replica."""
    lines = [
        f"layout {found.layout}, {found.replicas} wanted of each shard"
        if found.placed
        else "every vector_search process holds this collection"
    ]
    for one in found.data:
        share = 100 * (one.high - one.low) / (1 << 32)
        state = " splitting" if one.split else ""
        state += "" if one.served else " MISSING"
        lines.append(
            f"shard {one.shard}  {share:.3g} %  {_count(one.rows)} vectors  {_count(one.bytes)} bytes{state}"
        )
        for each in one.replicas:
            alive = "" if each.alive else "  not alive"
            why = f"  {printable(each.why)}" if each.why else ""
            lines.append(f"  {each.name}  {each.state}{alive}{why}")
    return "\n".join(lines)


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
