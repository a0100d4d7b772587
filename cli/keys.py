"""`spillway keys`: create, list, rotate and revoke API keys."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from typing import Any

from cli.bus_access import add_place, with_bus
from common.bus import Bus
from common.errors import ConfigError
from common.registry.api_keys import ApiKey, KeyStore

HELP = "create, list, rotate and revoke API keys"


def add(subparsers: Any) -> None:
    """Add the command and its verbs."""
    parser = subparsers.add_parser("keys", help=HELP, description=HELP)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    create = verbs.add_parser("create", help="print a new key, which is shown this once")
    create.add_argument("--tenant", required=True, help="who owns what is stored with the key")
    create.add_argument("--name", default="", help="a note for people")
    for quota in ("requests-per-minute", "tokens-per-minute", "concurrency", "page-bytes"):
        create.add_argument(f"--{quota}", type=int, default=0, metavar="N", help="0: unlimited")
    create.add_argument(
        "--timeout-s",
        type=float,
        default=0.0,
        metavar="S",
        help="deadline of requests that name none",
    )
    create.add_argument(
        "--priority", choices=("low", "normal"), default="normal", help="low: refused first"
    )
    listing = verbs.add_parser("list", help="show the keys, without their secrets")
    listing.add_argument("--json", action="store_true", help="for programs")
    rotate = verbs.add_parser("rotate", help="give a key a new secret; the old one ends at once")
    revoke = verbs.add_parser("revoke", help="remove a key")
    for verb in (rotate, revoke):
        verb.add_argument("id", metavar="KEY_ID", help="the part after sk-sw-, as `list` shows it")
    for verb in (create, listing, rotate, revoke):
        add_place(verb)


def run(args: argparse.Namespace) -> int:
    """Run the verb; 1 if there is no such key."""
    return with_bus(args, lambda bus: _run(args, bus))


async def _run(args: argparse.Namespace, bus: Bus) -> int:
    store = KeyStore(bus)
    if args.verb == "create":
        return await _create(args, store)
    if args.verb == "list":
        return _show(await store.list(), as_json=args.json)
    key_id = args.id.removeprefix("sk-sw-").split("-")[0]
    if args.verb == "rotate":
        _, text = await store.rotate(key_id)
        print(text)
        return 0
    if not await store.revoke(key_id):
        sys.stderr.write(f"spillway: no key {key_id!r}; `spillway keys list` shows them\n")
        return 1
    print(f"key {key_id} is revoked")
    return 0


async def _create(args: argparse.Namespace, store: KeyStore) -> int:
    try:
        _, text = await store.create(
            args.tenant,
            name=args.name,
            requests_per_minute=args.requests_per_minute,
            tokens_per_minute=args.tokens_per_minute,
            concurrency=args.concurrency,
            timeout_s=args.timeout_s,
            priority=args.priority,
            page_bytes=args.page_bytes,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(text)
    return 0


def _show(keys: list[ApiKey], *, as_json: bool) -> int:
    if as_json:
        shown = [
            {name: getattr(key, name) for name in ApiKey.__struct_fields__ if name != "digest"}
            for key in keys
        ]
        print(json.dumps(shown, indent=2))
        return 0
    for key in keys:
        made = dt.datetime.fromtimestamp(key.created_ms / 1000, dt.UTC)
        quotas = [
            f"{value} {what}"
            for value, what in (
                (key.requests_per_minute, "requests/min"),
                (key.tokens_per_minute, "tokens/min"),
                (key.concurrency, "at once"),
                (key.page_bytes, "bytes of pages"),
            )
            if value
        ]
        print(
            f"{key.id}  {key.tenant:<20} {made:%Y-%m-%d %H:%M}  "
            f"{', '.join(quotas) or 'unlimited':<20} {key.name}".rstrip()
        )
    if not keys:
        print("no keys; `spillway keys create --tenant NAME` makes one")
    return 0
