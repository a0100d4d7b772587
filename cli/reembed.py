"""`spillway reembed COLLECTION`: embed stored texts again after the encoder has changed."""

from __future__ import annotations

import argparse

from spillway_client import AsyncSpillway

from cli.http import add_server, talk


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "reembed",
        help="embed a collection again with the current encoder",
        description="Embed every stored text again and put the result in the collection's place. Searches are"
        " answered from the old vectors until then.",
    )
    parser.add_argument("collection")
    parser.add_argument("--model", help="the encoder to use (default: the server's)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="how long to wait"
    )
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Re-embed the collection, and print the encoder."""
    return talk(args, lambda client: _reembed(client, args), timeout_s=args.timeout)


async def _reembed(client: AsyncSpillway, args: argparse.Namespace) -> int:
    await client.collections.reembed(args.collection, model=args.model)
    collection = await client.collections.get(args.collection)
    documents = (collection.stats or {}).get("documents", "all")
    print(f"{collection.name}: {documents} documents embedded with {collection.model}")
    return 0
