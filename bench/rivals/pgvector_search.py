"""pgvector as V1 searches it: a table for each build of its graph, prepared statements over several connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bench.document import BenchOptions
from bench.rivals.pgvector import Postgres, packed, postgres
from bench.rivals.search_servers import EFS, Setting, builds_of, kept, parts
from bench.workloads.search_sets import K, SearchSet
from bench.workloads.vectors import Rows

SETTINGS = {
    "shared_buffers": "4GB", "maintenance_work_mem": "2GB", "effective_cache_size": "8GB", "jit": "off",
    "max_parallel_workers_per_gather": "0", "max_parallel_maintenance_workers": "2", "max_connections": "128",
    "synchronous_commit": "off", "max_wal_size": "8GB",
}  # fmt: skip
BUILDS = {"m16": "m = 16, ef_construction = 64", "m24": "m = 24, ef_construction = 200"}
LARGE_BUILDS = ("m24",)  # of a million rows it did more than m16 in every cell of V1
EXACT = "exact"  # by the bucket's own index, then by distance
WIDTHS = (2, 4, 8, 16, 64)  # connections tried where so many requests, or more, are in flight
_ONE = "SELECT id, v <#> $1 AS far FROM {table} {where} ORDER BY v <#> $1 LIMIT {k}"
_MANY = (
    "SELECT q.n, t.id, t.far FROM unnest($1::vector[]) WITH ORDINALITY AS q(v, n) CROSS JOIN LATERAL "
    "(SELECT id, v <#> q.v AS far FROM {table} {where} ORDER BY v <#> q.v LIMIT {k}) AS t"
)


class PgVectorServer:
    """Asks with as many connections as its setting says; what is more waits for one."""

    def __init__(self, server: Postgres, builds: Sequence[str]) -> None:
        self._server, self._builds = server, builds
        self._setting: dict[str, str | int] = {}
        self._links: list[Any] = []
        self._idle: asyncio.LifoQueue[tuple[Any, dict[str, Any]]] = asyncio.LifoQueue()

    @property
    def pids(self) -> tuple[int, ...]:
        """Its first process, whose children serve the connections."""
        return (self._server.pid,)

    def ladders(self, bound: int | None) -> Sequence[Sequence[Setting]]:
        """Return the efs of each build; with a filter, exact search as well."""
        found: list[list[Setting]] = [
            [{"build": name, "ef": ef} for ef in EFS] for name in self._builds
        ]
        return found if bound is None else [*found, [{"build": EXACT, "ef": EFS[0]}]]

    def widths(self, clients: int) -> Sequence[Setting]:
        """Return numbers of connections to try: the processors are few, and each connection is a process."""
        if clients < WIDTHS[1]:
            return [{"connections": clients}]
        return [{"connections": width} for width in WIDTHS if width <= clients]

    async def use(self, setting: Setting) -> None:
        """Connect anew with a setting."""
        await self.close()
        self._setting = dict(setting)
        exact = setting["build"] == EXACT
        words = [
            f"SET hnsw.ef_search = {setting['ef']}",
            "SET hnsw.iterative_scan = relaxed_order",
            f"SET enable_indexscan = {'off' if exact else 'on'}",
        ]
        self._idle = asyncio.LifoQueue()
        for _ in range(int(setting.get("connections", 2))):
            link = await self._server.connect()
            self._links.append(link)
            for word in words:
                await link.execute(word)
            self._idle.put_nowait((link, {}))

    def calls(self, queries: Rows, per: int, bound: int | None) -> list[tuple[str, Any]]:
        """Return a statement and its argument for each call."""
        where = "" if bound is None else f"WHERE bucket < {bound}"
        build = str(self._setting["build"])
        table = f"rows_{self._builds[0] if build == EXACT else build}"
        said = (_ONE if per == 1 else _MANY).format(table=table, where=where, k=K)
        rows = [[packed(row) for row in part] for part in parts(queries, per)]
        return [(said, row[0] if per == 1 else row) for row in rows]

    async def send(self, call: tuple[str, Any]) -> Any:
        """Return the rows of a call."""
        said, argument = call
        link, prepared = await self._idle.get()
        try:
            statement = prepared.get(said)
            if statement is None:
                statement = prepared[said] = await link.prepare(said)
            return await statement.fetch(argument)
        finally:
            self._idle.put_nowait((link, prepared))

    def ids(self, answer: Any) -> list[list[int]]:
        """Return the ids of an answer's rows, by query."""
        if answer and len(answer[0]) == 2:
            return [[row[0] for row in sorted(answer, key=lambda row: row[1])]]
        found: dict[int, list[tuple[float, int]]] = {}
        for number, name, far in answer:
            found.setdefault(number, []).append((far, name))
        return [[name for _, name in sorted(found[number])] for number in sorted(found)]

    async def fill(self, rows: SearchSet) -> None:
        """Make a table for each build: rows by COPY, then its indexes."""
        link = await self._server.connect()
        for name in self._builds:
            table = f"rows_{name}"
            await link.execute(
                f"DROP TABLE IF EXISTS {table}; CREATE TABLE {table} (id int PRIMARY KEY, bucket int NOT NULL, "
                f"v vector({rows.base.shape[1]})); ALTER TABLE {table} ALTER v SET STORAGE PLAIN"
            )
            given = ((i, int(rows.buckets[i]), packed(row)) for i, row in enumerate(rows.base))
            while part := list(islice(given, 20_000)):
                await link.copy_records_to_table(table, records=part)
            await link.execute(
                f"CREATE INDEX ON {table} USING hnsw (v vector_ip_ops) WITH ({BUILDS[name]})"
            )
            await link.execute(f"CREATE INDEX ON {table} (bucket)")
            await link.execute(f"VACUUM ANALYZE {table}")
        await link.close()

    async def warm(self, folder: Path, queries: Rows) -> None:
        """Bring all builds into memory: their files into the kernel's, then, by searches that look far, into its own.

        A start finds neither there, and thousands of single searches would each wait for pages.
        """
        await asyncio.to_thread(_read_files, folder)
        for build in self._builds:
            await self.use({"build": build, "ef": EFS[-1], "connections": 2})
            calls = self.calls(queries, 1, None)
            for at in range(0, len(calls), 2):
                await asyncio.gather(*map(self.send, calls[at : at + 2]))
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            await link.close()
        self._links = []


@contextlib.asynccontextmanager
async def pgvector_search(rows: SearchSet, options: BenchOptions) -> AsyncIterator[PgVectorServer]:
    """Run PostgreSQL, filled if its directory is not."""
    folder = kept(rows, "pgvector", options)
    folder.mkdir(parents=True, exist_ok=True)
    async with postgres(folder, options, settings=SETTINGS) as found:
        server = PgVectorServer(found, builds_of(rows.shape, BUILDS, LARGE_BUILDS))
        if not (folder / "complete").exists():
            await server.fill(rows)
            (folder / "complete").touch()
        await server.warm(folder, rows.tuning)
        yield server
        await server.close()


def _read_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        # Some files of the server are gone by now, others are sockets.
        with contextlib.suppress(OSError), path.open("rb") as file:
            while file.read(1 << 20):
                pass
