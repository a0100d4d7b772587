"""`spillway search COLLECTION TEXT`: print the best passages, for people or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import textwrap
from typing import Any, Literal, get_args

from spillway_client import AsyncSpillway, Hit, SearchMode

from cli.http import add_server, say, talk
from cli.terminal import printable

_SNIPPET_LINES = 3


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "search",
        help="find the best passages of a collection",
        description="Find the passages that are nearest in meaning, that hold the words (--mode text), or both ways at"
        " once (--mode hybrid).",
    )
    parser.add_argument("collection")
    parser.add_argument("text", nargs="+", help="what to look for")
    parser.add_argument("-k", type=int, default=5, help="how many passages (5)")
    parser.add_argument("--filter", help='by metadata, e.g. \'{"year": {"$gte": 2020}}\'')
    add_ranking(parser)
    parser.add_argument(
        "--min-score", type=float, metavar="S", help="only hits that score S or more"
    )
    parser.add_argument(
        "--scores", action="store_true", help="print what each search gave a hit: vector, text"
    )
    parser.add_argument("--effort", help='how much to look at: a number, or "exact"')
    parser.add_argument(
        "--time-budget-ms", type=float, metavar="MS", help="use the most effort that fits into MS"
    )
    parser.add_argument(
        "--partial", action="store_true", help="answer without shards that cannot be reached"
    )
    parser.add_argument("--json", action="store_true", help="print the hits as JSON")
    add_server(parser)
    parser.set_defaults(run=run)


def add_ranking(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Add the options for the mode of a search, and for the diversity of its hits."""
    parser.add_argument(
        "--mode",
        choices=get_args(SearchMode),
        help=f"{note}compare vectors, the words of texts, or both (vector)",
    )
    parser.add_argument(
        "--diversity",
        type=_share,
        metavar="D",
        help=f"{note}how much hits should differ from each other, from 0 to 1",
    )


def mmr_of(args: argparse.Namespace) -> dict[str, float] | None:
    """Return the `mmr` of a request, None without --diversity."""
    return None if args.diversity is None else {"lambda": round(1 - args.diversity, 6)}


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number from 0 to 1")
    return share


def run(args: argparse.Namespace) -> int:
    """Search and print the hits; 0 even without a hit."""
    try:
        wanted, effort = filter_of(args), _effort(args.effort)
    except ValueError as error:
        return say(str(error), 2)
    return talk(args, lambda client: _search(client, args, wanted, effort))


def filter_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the filter of a command line, None without one; ValueError names the fault."""
    if not args.filter:
        return None
    try:
        wanted = json.loads(args.filter)
    except ValueError as error:
        raise ValueError(f"--filter is {args.filter!r}: {error}; expected a JSON object") from None
    if not isinstance(wanted, dict):
        raise ValueError(f"--filter is {args.filter!r}; expected a JSON object")
    return wanted


def _effort(text: str | None) -> int | Literal["exact"] | None:
    if text is None:
        return None
    if text == "exact":
        return "exact"
    if text.isascii() and text.isdigit():
        return int(text)
    raise ValueError(f'--effort is {text!r}; expected a number from 1 on, or "exact"')


async def _search(
    client: AsyncSpillway,
    args: argparse.Namespace,
    wanted: Any,
    effort: int | Literal["exact"] | None,
) -> int:
    found = await client.search(
        args.collection,
        " ".join(args.text),
        k=args.k,
        filter=wanted,
        effort=effort,
        time_budget_ms=args.time_budget_ms,
        min_score=args.min_score,
        mode=args.mode,
        mmr=mmr_of(args),
        include_scores=args.scores or None,
        partial=args.partial or None,
    )
    if args.json:
        hits = [dataclasses.asdict(hit) for hit in found.data]
        told: dict[str, Any] = {"data": hits, "mode": found.mode, "path": found.path}
        if found.search is not None:
            told["search"] = dataclasses.asdict(found.search)
        if args.partial:
            told["missing"] = found.missing
        print(json.dumps(told, ensure_ascii=False, indent=2))
        return 0
    for one in found.missing:
        say(f"shard {one['shard']} is missing: {one['why']}", 0)
    if not found.data:
        print("nothing found")
    width = min(shutil.get_terminal_size().columns, 100)
    for hit in found.data:
        print(show(hit, width))
    return 0


def show(hit: Hit, width: int) -> str:
    """Return a hit as a heading line and a passage of at most three lines."""
    title = str((hit.metadata or {}).get("title") or "")
    head = f"{hit.score:.3f}  {hit.id}:{hit.start}-{hit.end}"
    if hit.page:
        head += f" page {hit.page}"
    if hit.scores:
        head += f"  ({', '.join(f'{name} {score:.3f}' for name, score in hit.scores.items())})"
    if title and title != hit.id:
        head += f"  {title}"
    passage = textwrap.wrap(
        " ".join((hit.text or "").split()),
        width=width,
        initial_indent="       ",
        subsequent_indent="       ",
        max_lines=_SNIPPET_LINES,
        placeholder=" …",
    )
    return "\n".join([printable(head), *map(printable, passage)])
