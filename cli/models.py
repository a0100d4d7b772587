"""`spillway models`: list the models that an instance serves."""

from __future__ import annotations

import argparse
import json
from typing import Any

from spillway_client import AsyncSpillway

from cli.http import add_server, talk


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("models", help="list the models of a server")
    parser.add_argument("--json", action="store_true", help="everything the server says")
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one model a line."""
    return talk(args, lambda client: _models(client, as_json=args.json))


async def _models(client: AsyncSpillway, *, as_json: bool) -> int:
    models = await client.models.list()
    if as_json:
        print(json.dumps([model.details for model in models], indent=2))
        return 0
    for model in models:
        print("  ".join([model.id, *_about(model.details)]))
    if not models:
        print("no models yet: no worker has announced one")
    return 0


def _about(details: dict[str, Any]) -> list[str]:
    """Return what tells models apart: a generator has a context, an encoder a dimension."""
    generates = details.get("kind") == "generate"
    names = {"kind": "kind", "dimension": "dimension", "max_tokens": "max_tokens"}
    if generates:
        names = {"kind": "kind", "max_tokens": "context"}
    return [f"{shown} {details[name]}" for name, shown in names.items() if name in details]
