"""`spillway sessions`: list, show, export, import, pin and delete conversations."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from spillway_client import AsyncSpillway, SessionInfo

from cli.http import add_server, talk
from cli.terminal import printable
from common.errors import ConfigError

_PART = 1 << 18  # bytes of pages read at once
HELP = "list, show, delete, pin, export and import sessions"


def add(subparsers: Any) -> None:
    """Add the command and its verbs."""
    parser = subparsers.add_parser("sessions", help=HELP, description=HELP)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", help="one session a line, the last used first")
    listing.add_argument(
        "--limit", type=int, default=100, metavar="N", help="at most so many (100)"
    )
    show = verbs.add_parser("show", help="a session and what was said in it")
    delete = verbs.add_parser("delete", help="remove a session, and prove that nothing is left")
    export = verbs.add_parser("export", help="write a session as JSON to stdout, or to a file")
    export.add_argument("--output", "-o", type=Path, metavar="FILE")
    export.add_argument(
        "--pages", type=Path, metavar="FILE", help="write its KV pages to this file, too"
    )
    pin = verbs.add_parser("pin", help="keep a session's KV pages until it ends")
    unpin = verbs.add_parser("unpin", help="let its KV pages go when there is no room")
    for verb in (show, delete, export, pin, unpin):
        verb.add_argument("id", metavar="ID", help="as `list` shows it")
    load = verbs.add_parser("import", help="make a new session of an exported one")
    load.add_argument("file", metavar="FILE", help="`-`: what is piped in")
    load.add_argument("--model", metavar="NAME", help="for this model (default: the document's)")
    load.add_argument("--pages", type=Path, metavar="FILE", help="the file of `export --pages`")
    for verb in (listing, show, delete):
        verb.add_argument("--json", action="store_true", help="for programs")
    for verb in (listing, show, delete, export, pin, unpin, load):
        add_server(verb)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    document = _read(args.file) if args.verb == "import" else {}
    verbs = {
        "list": _list,
        "show": _show,
        "delete": _delete,
        "export": _export,
        "pin": _pin,
        "unpin": _pin,
    }
    if args.verb == "import":
        return talk(args, lambda client: _import(client, document, args))
    return talk(args, lambda client: verbs[args.verb](client, args))


def _read(name: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}; expected an exported session") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {error}; expected an exported session in JSON") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{name}: expected an exported session, a JSON object")
    return document


async def _list(client: AsyncSpillway, args: argparse.Namespace) -> int:
    found: list[SessionInfo] = []
    async for session in client.sessions.iterate(page=min(max(args.limit, 1), 100)):
        found.append(session)
        if len(found) >= args.limit:
            break
    if args.json:
        print(json.dumps([session.details for session in found], indent=2, ensure_ascii=False))
        return 0
    for session in found:
        print(printable(_line(session)))
    if not found:
        print("no sessions; `spillway chat --session new` begins one")
    return 0


def _line(session: SessionInfo) -> str:
    used = dt.datetime.fromtimestamp(session.updated, dt.UTC)
    return (
        f"{session.id}  {session.model}  turns {session.turns}  tokens {session.tokens}"
        f"  used {used:%Y-%m-%d %H:%M} UTC  kept {session.ttl_s} s{'  pinned' * session.pinned}"
    )


async def _show(client: AsyncSpillway, args: argparse.Namespace) -> int:
    session = await client.sessions.get(args.id, include_messages=True)
    if args.json:
        print(json.dumps(session.details, indent=2, ensure_ascii=False))
        return 0
    print(printable(_line(session)))
    for message in session.messages or []:
        cut = " (cut short)" if message.get("partial") else ""
        print(f"\n{message['role']}{cut}: {printable(str(message['content']), lines=True)}")
    return 0


async def _delete(client: AsyncSpillway, args: argparse.Namespace) -> int:
    deleted = await client.sessions.delete(args.id)
    if args.json:
        print(json.dumps(deleted.details, indent=2, ensure_ascii=False))
    else:
        gone = [f"{kind} {count}" for kind, count in deleted.removed.items() if count]
        print(f"session {deleted.id} is deleted; removed: {', '.join(gone) or 'nothing else'}")
        print("a second search found nothing of it; --json shows the proof")
    return 0


async def _pin(client: AsyncSpillway, args: argparse.Namespace) -> int:
    print(printable(_line(await client.sessions.update(args.id, pin=args.verb == "pin"))))
    return 0


async def _export(client: AsyncSpillway, args: argparse.Namespace) -> int:
    document = await client.sessions.export(args.id)
    text = json.dumps(document, indent=2, ensure_ascii=False)
    if args.output is None:
        print(text)
    else:
        with _writable(args.output):
            args.output.write_text(f"{text}\n", encoding="utf-8")
    if args.pages is not None:
        with _writable(args.pages), args.pages.open("wb") as file:
            async for data in client.sessions.export_pages(args.id):
                file.write(data)
    return 0


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected a file that can be written"
        ) from None


async def _import(client: AsyncSpillway, document: dict[str, Any], args: argparse.Namespace) -> int:
    with contextlib.nullcontext() if args.pages is None else _readable(args.pages) as pages:
        session = (await client.sessions.load(document, model=args.model)).id
        print(session)
        if pages is not None:
            found = await client.sessions.load_pages(session, iter(partial(pages.read, _PART), b""))
            sys.stderr.write(
                f"pages: {found.stored + found.exists} are there now; {found.refused} found no room, "
                f"{found.damaged} are damaged, {found.foreign} belong to something else\n"
            )
    return 0


def _readable(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected what `export --pages` wrote"
        ) from None
