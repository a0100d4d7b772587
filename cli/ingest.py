"""`spillway ingest COLLECTION PATH…`: put documents and folders of them into a collection."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from spillway_client import AsyncSpillway, ConflictError, NotFoundError

from cli.files import MAX_FILE_BYTES, Found, Item, Problem, Root, Skipped
from cli.http import add_server, say, talk
from cli.reading_process import LIMIT_S, ReadingProcess
from cli.terminal import printable
from cli.upload import Counts, News, Stop, Upload

_LINE_EVERY_S = 5.0


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "ingest",
        help="put documents into a collection",
        description="Put the documents below each PATH into COLLECTION, created if missing: PDF, DOCX, PPTX, HTML,"
        " Markdown, code and any other text. A document's id is its path below PATH. Files without text are skipped and"
        " named; documents that cannot be read (scans without text, encrypted or damaged ones, spreadsheets) count as"
        " failed, and the status is 1. Unchanged files are left alone, changed ones replaced. Repeat an interrupted run"
        " to go on with it.",
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
    parser.add_argument("--max-bytes", type=int, default=MAX_FILE_BYTES, help="largest text taken")
    parser.add_argument(
        "--file-timeout",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"how long one document may take to be read (default: {LIMIT_S:g})",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="S",
        help="how long to wait for a server that is away",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ingest; 0 if every file was stored, 1 if some failed, 2 for a command that cannot work."""
    if args.source and len(args.path) > 1:
        return say("--source names one source; give one PATH with it", 2)
    limits = (args.max_bytes, args.patience, args.file_timeout)
    if not all(0 < limit < math.inf for limit in limits):
        return say("--max-bytes, --patience and --file-timeout must be above 0", 2)
    return talk(args, lambda client: _ingest(client, args), max_retries=20)


async def _ingest(client: AsyncSpillway, args: argparse.Namespace) -> int:
    counts, status = Counts(), 0
    with ReadingProcess(args.file_timeout) as reader:
        roots = [
            Root(
                path,
                args.source or path.resolve().as_posix(),
                args.glob,
                args.exclude,
                args.max_bytes,
                reader,
            )
            for path in args.path
        ]
        progress = IngestProgress(
            sys.stderr if args.json else sys.stdout, sum(r.count() for r in roots)
        )
        try:
            await ensure(client, args.collection)
            await _upload(client, args, roots, counts, progress)
        except Stop as error:
            status = say(str(error), 1)
    progress.end(counts, args.collection, shown=not args.json)
    if args.json:
        print(json.dumps(summary(counts, args.collection, progress.seconds), ensure_ascii=False))
    return status or (1 if counts.failed else 0)


async def _upload(
    client: AsyncSpillway,
    args: argparse.Namespace,
    roots: list[Root],
    counts: Counts,
    progress: IngestProgress,
) -> None:
    taken: dict[str, Path] = {}
    for root in roots:
        if not root.path.exists():
            counts.failed.append(Problem(str(root.path), "no such file or folder"))
            progress(counts, counts.failed[-1])
            continue
        upload = Upload(
            client,
            args.collection,
            root.source,
            counts=counts,
            notice=progress,
            patience_s=args.patience,
        )
        await upload.run(_unique(root, taken), prune=root.wants if args.prune else None)


async def ensure(client: AsyncSpillway, name: str) -> None:
    """Create the collection unless it exists; Stop if it holds vectors only."""
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
    """Yield the documents of a root; an id that another path of this run has taken is a problem, not an overwrite."""
    for found in root.documents():
        yield _claimed(found, root.path, taken)


def _claimed(found: Found, path: Path, taken: dict[str, Path]) -> Found:
    if isinstance(found, Item):
        owner = taken.setdefault(found.id, path)
        if owner != path:
            return Problem(found.id, f"{owner} holds the same path; ingest their common folder")
    return found


class IngestProgress:
    """The progress of a run: one changing line on a terminal, else a line every few seconds; then a summary.

    `total` is the number of files to look at, 0 if it is not known.
    """

    def __init__(self, out: TextIO, total: int = 0) -> None:
        self._out, self._total = out, total
        self._tty = out.isatty()
        self._began = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._began

    def __call__(self, counts: Counts, news: News | None) -> None:
        """Show the run's progress, and at once failed and skipped files, and notes."""
        now = time.monotonic()
        if news is not None:
            what = {Problem: "failed", Skipped: "skipped"}.get(type(news), "note")
            self._clear()
            print(printable(f"{what}: {news.id}: {news.reason}"), file=sys.stderr, flush=True)
        if now - self._last < (0.1 if self._tty else _LINE_EVERY_S):
            return
        self._last = now
        self._clear()
        line = self._line(counts, now - self._began)
        width = shutil.get_terminal_size().columns - 1
        self._out.write(line[:width] if self._tty else line + "\n")
        self._out.flush()

    def end(self, counts: Counts, collection: str, *, shown: bool = True) -> None:
        """Print the summary, unless output is off."""
        self._clear()
        if shown:
            said = f"{collection}: {describe(counts)}; {self.seconds:.1f} s"
            print(said, file=self._out, flush=True)

    def _line(self, counts: Counts, took_s: float) -> str:
        rate = counts.chunks / max(took_s, 0.001)
        of = f" of {self._total}" if self._total else ""
        left = time_left(counts.files, self._total, took_s)
        about = f" · about {left} left" if left else ""
        return f"{counts.files}{of} files · {describe(counts)} · {rate:.0f} chunks/s{about}"

    def _clear(self) -> None:
        if self._tty:
            self._out.write("\r\x1b[K")


def time_left(files: int, total: int, took_s: float) -> str:
    """Return the time left at the present rate ("40 s", "12 min", "3.5 h"); "" while it cannot be told."""
    if not 0 < files < total:
        return ""
    left_s = took_s / files * (total - files)
    if left_s < 90:
        return f"{math.ceil(left_s)} s"
    return f"{left_s / 60:.0f} min" if left_s < 5400 else f"{left_s / 3600:.1f} h"


def summary(counts: Counts, collection: str, took_s: float) -> dict[str, Any]:
    """Return the summary of a run, for programs."""
    listed = {
        name: [{"id": one.id, "reason": one.reason} for one in some]
        for name, some in (
            ("skipped", counts.skipped),
            ("failed", counts.failed),
            ("notes", counts.noted),
        )
    }
    return {
        "collection": collection,
        "files": counts.files,
        "stored": counts.stored,
        "chunks": counts.chunks,
        "unchanged": counts.unchanged,
        "removed": counts.removed,
        **listed,
        "seconds": round(took_s, 1),
    }


def describe(counts: Counts) -> str:
    """Return the counts of a run as a sentence for people."""
    parts = [
        f"{counts.stored} stored ({counts.chunks} chunks)",
        f"{counts.unchanged} unchanged",
        f"{counts.removed} removed",
        f"{len(counts.skipped)} skipped",
        f"{len(counts.failed)} failed",
    ]
    return ", ".join(part for part in parts if not part.startswith("0 ") or "stored" in part)
