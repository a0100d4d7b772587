"""V1: vector search at recall@10 of 0.95.

(a) the index in process against libraries, (b) the mesh against servers that people run, (c) one query through it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import uvloop

from bench.document import BenchOptions, Body
from bench.partial import PartialResults
from bench.suites import v1_process, v1_process_tables, v1_query, v1_servers, v1_tables
from bench.suites.v1_process import ProcessKept
from bench.suites.v1_query import QueryFound
from bench.suites.v1_servers import ServersKept

QUERY = "query"


class SearchKept(msgspec.Struct):
    """All that V1 measured."""

    process: ProcessKept = msgspec.field(default_factory=ProcessKept)
    servers: ServersKept = msgspec.field(default_factory=ServersKept)
    query: QueryFound | None = None


def run(options: BenchOptions) -> Body:
    """Measure against the servers first, then one query, then in process; `--only` takes parts of the cells' names."""
    partly = PartialResults(options, SearchKept)
    kept = partly.kept
    uvloop.run(v1_servers.measure(partly, kept.servers, options))
    if options.only in QUERY and kept.query is None and partly.begins():
        with tempfile.TemporaryDirectory(prefix="spillway-v1-") as folder:
            kept.query = v1_query.measure(v1_process.build, options, Path(folder))
        partly.save()
    uvloop.run(v1_process.measure(partly, kept.process, options))
    return describe(kept, partly.left)


def describe(kept: SearchKept, left: int = 0) -> Body:
    """Turn what was measured into tables and verdicts: (a), (b), (c), in this order, each where there is something."""
    body = Body(left=left)
    v1_process_tables.describe(kept.process, body)
    v1_tables.describe(kept.servers, body)
    if kept.query is not None:
        v1_query.describe(kept.query, body)
    body.notes += origins(kept)
    return body


def origins(kept: SearchKept) -> list[str]:
    """Return which parts were measured where, by which commit, a line each; nothing if all agree."""
    parts: dict[tuple[str, str], list[str]] = {}
    for part, cells in (("(a)", kept.process.cells), ("(b)", kept.servers.cells)):
        for cell in cells.values():
            parts.setdefault((cell.processor, cell.commit), []).append(f"{part} {cell.set}")
    if kept.query is not None:
        query = kept.query
        parts.setdefault((query.processor, query.commit), []).append(f"(c) {query.set}")
    if len(parts) < 2:
        return []
    return [
        f"On {name}, commit {commit[:8]}: {'; '.join(dict.fromkeys(sets))}."
        for (name, commit), sets in parts.items()
    ]
