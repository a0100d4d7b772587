"""`spillway ingest COLLECTION PATH…`: put files and folders into a collection."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from spillway_client import AsyncSpillway, ConflictError, NotFoundError

from cli.files import MAX_FILE_BYTES, Found, Item, Problem, Root, Skipped
from cli.http import add_server, say, talk
from cli.upload import Counts, Stop, Upload

_LINE_EVERY_S = 5.0
_SHOWN_PROBLEMS = 20


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "ingest",
        help="put text files into a collection",
        description="Put the text files below each PATH into COLLECTION, created if missing. A document's id is its"
        " path below PATH. What is no text is skipped and named; documents in formats that are not read (PDF, word"
        " processors' files, spreadsheets) count as failed, and the status is 1. Unchanged files are left alone,"
        " changed ones replaced; an interrupted run resumes by running it again.",
    )
    parser.add_argument("collection")
    parser.add_argument("path", nargs="+", type=Path, help="folders or files")
    parser.add_argument(
        "--glob", action="append", default=[], help="only these, e.g. '*.md'; repeatable"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], help="not these files or folders; repeatable"
    )
    parser.add_argument(
        "--prune", action="store_true", help="remove documents of this source whose file is gone"
    )
    parser.add_argument(
        "--source", help="the source the documents belong to (default: the absolute path given)"
    )
    parser.add_argument("--max-bytes", type=int, default=MAX_FILE_BYTES, help="largest file taken")
    parser.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="S",
        help="how long to wait for a server that is away",
    )
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ingest; 0 if every file is in, 1 if some failed, 2 for a command that cannot work."""
    if args.source and len(args.path) > 1:
        return say("--source names one source; give one PATH with it", 2)
    if args.max_bytes < 1 or not args.patience > 0:
        return say("--max-bytes and --patience must be above 0", 2)
    return talk(args, lambda client: _ingest(client, args), max_retries=20)


async def _ingest(client: AsyncSpillway, args: argparse.Namespace) -> int:
    progress = Progress(sys.stdout)
    counts, taken = Counts(), dict[str, Path]()
    try:
        await ensure(client, args.collection)
        for path in args.path:
            if not path.exists():
                counts.failed.append(Problem(str(path), "no such file or folder"))
                progress(counts, counts.failed[-1])
                continue
            root = Root(
                path,
                args.source or path.resolve().as_posix(),
                args.glob,
                args.exclude,
                args.max_bytes,
            )
            upload = Upload(
                client,
                args.collection,
                root.source,
                counts=counts,
                notice=progress,
                patience_s=args.patience,
            )
            unique = _unique(root, taken)
            await upload.run(unique, prune=root.wants if args.prune else None)
    except Stop as error:
        progress.end(counts, args.collection)
        return say(str(error), 1)
    progress.end(counts, args.collection)
    return 1 if counts.failed else 0


async def ensure(client: AsyncSpillway, name: str) -> None:
    """Create the collection unless it is there; Stop if it holds vectors only."""
    try:
        found = await client.collections.get(name)
    except NotFoundError:
        try:
            found = await client.collections.create(name)
        except ConflictError:  # another run was faster
            found = await client.collections.get(name)
    if found.model is None:
        raise Stop(f"collection {name!r} holds vectors only; ingest needs one with a model")


def _unique(root: Root, taken: dict[str, Path]) -> Iterator[Found]:
    """Yield what the root holds; an id another path of this run has taken is a problem, not an overwrite."""
    for found in root.documents():
        yield _claimed(found, root.path, taken)


def _claimed(found: Found, path: Path, taken: dict[str, Path]) -> Found:
    if isinstance(found, Item):
        owner = taken.setdefault(found.id, path)
        if owner != path:
            return Problem(found.id, f"{owner} holds the same path; ingest their common folder")
    return found


class Progress:
    """One line that changes on a terminal, a plain line every few seconds elsewhere, then a summary."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self._began = self._last = time.monotonic()
        self._shown = {"failed": 0, "skipped": 0}

    def __call__(self, counts: Counts, news: Problem | Skipped | None) -> None:
        """Show where the run stands, and at once what failed or was skipped."""
        now = time.monotonic()
        if news is not None:
            what = "failed" if isinstance(news, Problem) else "skipped"
            if self._shown[what] < _SHOWN_PROBLEMS:
                self._clear()
                self._shown[what] += 1
                print(f"{what}: {news.id}: {news.reason}", file=sys.stderr, flush=True)
        if now - self._last < (0.1 if self._tty else _LINE_EVERY_S):
            return
        self._last = now
        self._clear()
        line = self._line(counts, now)
        width = shutil.get_terminal_size().columns - 1
        self._out.write(line[:width] if self._tty else line + "\n")
        self._out.flush()

    def end(self, counts: Counts, collection: str) -> None:
        """Print the summary."""
        self._clear()
        took_s = time.monotonic() - self._began
        print(f"{collection}: {describe(counts)}; {took_s:.1f} s", file=self._out, flush=True)
        for what, all_of_them in (("failed", counts.failed), ("skipped", counts.skipped)):
            hidden = len(all_of_them) - self._shown[what]
            if hidden > 0:
                print(f"… and {hidden} more {what}", file=sys.stderr)

    def _line(self, counts: Counts, now: float) -> str:
        rate = counts.chunks / max(now - self._began, 0.001)
        return f"{counts.seen} files · {describe(counts)} · {rate:.0f} chunks/s"

    def _clear(self) -> None:
        if self._tty:
            self._out.write("\r\x1b[K")


def describe(counts: Counts) -> str:
    """Return the counts as people read them."""
    parts = [
        f"{counts.stored} stored ({counts.chunks} chunks)",
        f"{counts.unchanged} unchanged",
        f"{counts.removed} removed",
        f"{len(counts.skipped)} skipped",
        f"{len(counts.failed)} failed",
    ]
    return ", ".join(part for part in parts if not part.startswith("0 ") or "stored" in part)
