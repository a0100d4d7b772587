"""Documents, chunks and metadata of one shard, in SQLite.

SQLite rather than LMDB: metadata filters are set algebra over an index, which SQL does and a key-value store does not.
It runs in WAL mode with synchronous=NORMAL: a crash may cost its last transactions but never its integrity, and the
log, which is synced first, gives those back. The applied id is stored in the same transaction as its writes, so
replaying the log is idempotent.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from common.wire.search import FOLLOWING_BYTES, Document, Hit, StoredDocument
from services.vector_search.filters import Attributes, Filter, attributes
from services.vector_search.index.memory import limit_bytes
from services.vector_search.text_index import TextIndex
from services.vector_search.write_log import EntryId, format_id, parse_id

SCHEMA = """
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS document (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, hash TEXT NOT NULL,
    chunks INTEGER NOT NULL, metadata BLOB NOT NULL, text BLOB);
CREATE TABLE IF NOT EXISTS chunk (
    label INTEGER PRIMARY KEY, document INTEGER NOT NULL, ordinal INTEGER NOT NULL,
    start INTEGER NOT NULL, stop INTEGER NOT NULL, first_byte INTEGER NOT NULL, bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL, vector BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS chunk_document ON chunk (document);
CREATE TABLE IF NOT EXISTS attribute (
    path TEXT NOT NULL, kind INTEGER NOT NULL, value NOT NULL, document INTEGER NOT NULL,
    PRIMARY KEY (path, kind, value, document)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seen (
    request TEXT NOT NULL, position INTEGER NOT NULL, at_ms INTEGER NOT NULL,
    PRIMARY KEY (request, position)) WITHOUT ROWID;
"""
_HITS = """
SELECT c.label, d.id, c.ordinal, c.start, c.stop,
       CASE WHEN ?1 THEN substr(d.text, c.first_byte + 1, c.bytes) END, CASE WHEN ?2 THEN d.metadata END,
       CASE WHEN ?3 THEN substr(d.text, c.first_byte + c.bytes + 1, ?3) END
FROM chunk c JOIN document d ON d.number = c.document
WHERE c.label IN (SELECT value FROM json_each(?4))
"""
PAGE_BYTES = 2 * 1024 * 1024
SEEN_MS = 24 * 3600 * 1000
# The cache of a connection: at most these bytes, and at most this share of the process' memory.
_CACHE_BYTES, _CACHE_SHARE = 16 << 20, 64
_json = msgspec.json.Encoder()


class Added(NamedTuple):
    """A document just stored: its number, its chunks' labels, the labels it replaced, and its attributes."""

    number: int
    labels: list[int]
    replaced: list[int]
    attributes: Attributes


class StoredChunks(NamedTuple):
    """A run of chunks in label order; `sound` is False where a vector's checksum is wrong."""

    labels: np.ndarray[Any, np.dtype[np.int64]]
    numbers: np.ndarray[Any, np.dtype[np.int64]]
    vectors: list[bytes]
    sound: list[bool]


def connect(path: Path) -> sqlite3.Connection:
    """Open a database so that readers never wait for the writer and a crash never breaks it."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA cache_size=-{_cache_bytes(limit_bytes()) >> 10}")
    return connection


def _cache_bytes(limit: int) -> int:
    """Return the bytes of a connection's cache in a process that may use `limit` bytes (0: not known)."""
    return min(_CACHE_BYTES, limit // _CACHE_SHARE) if limit else _CACHE_BYTES


def copy_database(path: Path, target: Path) -> None:
    """Copy a database that others may be writing to, as of one moment; sqlite3 errors pass through."""
    source, copied = connect(path), sqlite3.connect(target)
    try:
        source.backup(copied)
    finally:
        copied.close()
        source.close()


class ReaderPool:
    """Connections for readers: opened when none is idle, and kept for later readers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection; sqlite3.ProgrammingError once closed."""
        with self._lock:
            if self._closed:
                raise sqlite3.ProgrammingError("the store is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = connect(self._path)
        try:
            yield connection
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def close(self) -> None:
        """Lend no more connections; readers at work finish first."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class Documents:
    """The store of one shard: one writer at a time, many readers; sqlite3 errors pass through.

    `begin` … `put`/`delete` … `commit(applied)` or `rollback`. A document gets a new number whenever it is stored, and
    its chunks new labels, so the content of a number or label never changes. `texts` is the index of the chunks' words,
    changed in the same transactions.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = connect(path)
        self._writer.executescript(SCHEMA)
        self._readers = ReaderPool(path)
        self.texts = TextIndex(self._writer, self._readers.one)
        self._load_state()

    def _load_state(self) -> None:
        state = dict(self._writer.execute("SELECT name, value FROM state").fetchall())
        self.applied: EntryId = parse_id(state.get("applied", "0-0"))
        self.next_number: int = state.get("next_number", 1)  # above all numbers in use
        self._next_label: int = state.get("next_label", 1)
        self.count: int = self._writer.execute("SELECT count(*) FROM document").fetchone()[0]

    # -- writing

    def begin(self) -> None:
        """Open the transaction of a batch, unless it is open."""
        if not self._writer.in_transaction:
            self._writer.execute("BEGIN IMMEDIATE")

    def savepoint(self) -> None:
        """Set a savepoint, to which `undo` returns."""
        self._writer.execute("SAVEPOINT write")
        self._mark = (self.next_number, self._next_label, self.count)

    def undo(self) -> None:
        """Take back all changes since `savepoint`."""
        self._writer.execute("ROLLBACK TO write")
        self.next_number, self._next_label, self.count = self._mark

    def commit(self, applied: EntryId) -> None:
        """Make the batch visible together with its applied id."""
        rows = [
            ("applied", format_id(applied)),
            ("next_number", self.next_number),
            ("next_label", self._next_label),
        ]
        self._writer.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", rows)
        self._writer.execute("COMMIT")
        self.applied = applied

    def rollback(self) -> None:
        """Take back all changes since `begin`."""
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
        self._load_state()
        self.texts.load()

    def first_time(self, request: str, index: int, at_ms: int) -> bool:
        """Record a write's identity; False if it was seen in the last 24 h."""
        row = self._writer.execute(
            "SELECT at_ms FROM seen WHERE request=? AND position=?", (request, index)
        ).fetchone()
        if row is not None and at_ms - row[0] < SEEN_MS:
            return False
        self._writer.execute(
            "INSERT OR REPLACE INTO seen VALUES (?, ?, ?)", (request, index, at_ms)
        )
        return True

    def put(self, document: Document) -> Added:
        """Store a document, replacing its namesake with all its chunks."""
        replaced = self.delete(document.id)
        number, self.next_number = self.next_number, self.next_number + 1
        text = None if document.text is None else document.text.encode()
        metadata = _json.encode(document.metadata)
        self._writer.execute(
            "INSERT INTO document VALUES (?, ?, ?, ?, ?, ?)",
            (number, document.id, document.hash, len(document.chunks), metadata, text),
        )
        rows = []
        passages = []
        at = _byte_offsets(document)
        for ordinal, chunk in enumerate(document.chunks):
            label, self._next_label = self._next_label, self._next_label + 1
            first, last = at[chunk.start], at[chunk.end]
            span = (chunk.start, chunk.end, first, last - first)
            rows.append((label, number, ordinal, *span, _checksum(chunk.vector), chunk.vector))
            passages.append((label, (document.text or "")[chunk.start : chunk.end]))
        self._writer.executemany("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self.texts.add(passages)
        found = attributes(msgspec.json.decode(metadata))
        self._writer.executemany(
            "INSERT OR IGNORE INTO attribute VALUES (?, ?, ?, ?)",
            [(path, *value, number) for path, values in found.items() for value in values],
        )
        self.count += 1
        return Added(number, [row[0] for row in rows], replaced, found)

    def delete(self, identity: str) -> list[int]:
        """Remove a document; return the labels of its chunks, [] if there is none."""
        row = self._writer.execute(
            "SELECT number, metadata, text FROM document WHERE id=?", (identity,)
        ).fetchone()
        if row is None:
            return []
        number, metadata, text = row
        chunks = self._writer.execute(
            "SELECT label, first_byte, bytes FROM chunk WHERE document=?", (number,)
        ).fetchall()
        if text is not None:
            self.texts.remove((label, text[at : at + size].decode()) for label, at, size in chunks)
        self._writer.execute("DELETE FROM chunk WHERE document=?", (number,))
        self._writer.executemany(
            "DELETE FROM attribute WHERE path=? AND kind=? AND value=? AND document=?",
            [
                (path, *value, number)
                for path, values in attributes(msgspec.json.decode(metadata)).items()
                for value in values
            ],
        )
        self._writer.execute("DELETE FROM document WHERE number=?", (number,))
        self.count -= 1
        return [label for label, _, _ in chunks]

    def checkpoint(self, now_ms: int) -> bool:
        """Make everything committed durable in the main file; False if readers stood in the way."""
        self._writer.execute("DELETE FROM seen WHERE at_ms < ?", (now_ms - SEEN_MS,))
        busy, _, _ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    # -- reading

    def hits(
        self,
        labels: Sequence[int],
        *,
        with_text: bool,
        with_metadata: bool,
        following: bool = False,
    ) -> dict[int, Hit]:
        """Return a hit with score 0 for each label that still exists."""
        more = FOLLOWING_BYTES if following else 0
        with self._readers.one() as reader:
            rows = reader.execute(
                _HITS, (with_text, with_metadata, more, _json.encode(list(labels)).decode())
            )
            return {
                label: Hit(
                    id=identity,
                    score=0.0,
                    chunk=ordinal,
                    start=start,
                    end=stop,
                    text=None if text is None else text.decode(),
                    metadata=None if metadata is None else msgspec.json.decode(metadata),
                    # The last character may have been cut.
                    following=None if after is None else after.decode(errors="ignore"),
                )
                for label, identity, ordinal, start, stop, text, metadata, after in rows
            }

    def matching(self, condition: Filter) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the numbers of the documents a filter matches."""
        with self._readers.one() as reader:
            rows = reader.execute(condition.sql, condition.parameters).fetchall()
        return np.fromiter((row[0] for row in rows), dtype=np.int64, count=len(rows))

    def get(self, ids: Sequence[str], *, text: bool, vectors: bool) -> list[StoredDocument]:
        """Return the documents that exist, in the order asked."""
        with self._readers.one() as reader:
            rows = reader.execute(
                "SELECT * FROM document WHERE id IN (SELECT value FROM json_each(?))",
                (_json.encode(list(ids)).decode(),),
            ).fetchall()
            found = {row[1]: self._stored(reader, row, text=text, vectors=vectors) for row in rows}
        return [found[identity] for identity in ids if identity in found]

    def page(
        self, cursor: str | None, limit: int, condition: Filter | None, *, text: bool, vectors: bool
    ) -> tuple[list[StoredDocument], str | None]:
        """Return up to `limit` documents after a cursor, by id, and the next page's cursor (None at the end).

        A page ends early rather than exceed a message.
        """
        where = f" AND number IN ({condition.sql})" if condition else ""
        sql = f"SELECT * FROM document WHERE id > ?{where} ORDER BY id LIMIT ?"  # noqa: S608 - marks only
        parameters = [cursor or "", *(condition.parameters if condition else []), limit + 1]
        if cursor is None:
            sql = sql.replace("id > ?", "id >= ?", 1)
        found: list[StoredDocument] = []
        size = 0
        with self._readers.one() as reader:
            for row in reader.execute(sql, parameters):
                if len(found) == limit or (found and size > PAGE_BYTES):
                    return found, found[-1].id
                found.append(self._stored(reader, row, text=text, vectors=vectors))
                size += _size_of(found[-1]) + len(row[4])
        return found, None

    @staticmethod
    def _stored(
        reader: sqlite3.Connection, row: tuple[Any, ...], *, text: bool, vectors: bool
    ) -> StoredDocument:
        number, identity, digest, chunks, metadata, body = row
        blobs = None
        if vectors:
            select = "SELECT vector FROM chunk WHERE document=? ORDER BY ordinal"
            blobs = b"".join(blob for (blob,) in reader.execute(select, (number,)))
        return StoredDocument(
            id=identity,
            hash=digest,
            chunks=chunks,
            text=body.decode() if text and body is not None else None,
            metadata=msgspec.json.decode(metadata),
            vectors=blobs,
        )

    def chunks(self, batch: int = 4096) -> Iterator[StoredChunks]:
        """Yield every chunk in label order."""
        with self._readers.one() as reader:
            rows = reader.execute(
                "SELECT label, document, checksum, vector FROM chunk ORDER BY label"
            )
            while part := rows.fetchmany(batch):
                yield StoredChunks(
                    np.array([row[0] for row in part], dtype=np.int64),
                    np.array([row[1] for row in part], dtype=np.int64),
                    [row[3] for row in part],
                    [_checksum(row[3]) == row[2] for row in part],
                )
            reader.execute("PRAGMA shrink_memory")  # searches do not need these pages in memory

    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the labels of all chunks, rising."""
        with self._readers.one() as reader:
            rows = reader.execute("SELECT label FROM chunk ORDER BY label")
            return np.fromiter((row[0] for row in rows), dtype=np.int64)

    @property
    def size(self) -> int:
        """Bytes of the database's files."""
        parts = [self._path, self._path.with_name(self._path.name + "-wal")]
        return sum(part.stat().st_size for part in parts if part.exists())

    def close(self) -> None:
        """Close; readers at work finish first."""
        self._readers.close()
        self._writer.close()


def _checksum(vector: bytes) -> int:
    """Return the signed xxh3-64 kept beside a vector, so that a damaged one is found at start."""
    value = int(xxhash.xxh3_64_intdigest(vector))
    return value - (1 << 64) if value >= 1 << 63 else value


def _byte_offsets(document: Document) -> dict[int, int]:
    """Return where each chunk boundary (in characters) stands in the UTF-8 text, in one pass."""
    bounds = sorted({bound for chunk in document.chunks for bound in (chunk.start, chunk.end)})
    text = document.text or ""
    if text.isascii():
        return {bound: bound for bound in bounds}
    offsets, before, size = {}, 0, 0
    for bound in bounds:
        size += len(text[before:bound].encode())
        before = bound
        offsets[bound] = size
    return offsets


def _size_of(document: StoredDocument) -> int:
    """Return about how many bytes a document takes in a message, metadata aside."""
    return 4 * len(document.text or "") + len(document.vectors or b"") + len(document.id)
