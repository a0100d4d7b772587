"""The files of the two shards that a shard is split into, made from its database beside searches and writes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from common.registry.layout import hash_of_document
from services.vector_search.documents import SCHEMA, connect

_TABLES = (
    "INSERT INTO main.document SELECT * FROM parent.document WHERE hashed(id) >= ?1 AND hashed(id) < ?2",
    "INSERT INTO main.chunk SELECT * FROM parent.chunk WHERE document IN (SELECT number FROM main.document)",
    "INSERT INTO main.attribute SELECT * FROM parent.attribute WHERE document IN (SELECT number FROM main.document)",
    "INSERT INTO main.seen SELECT * FROM parent.seen",
    # The index of texts is not copied: it is built anew, and the state that tells how far that is begins anew with it.
    "INSERT INTO main.state SELECT * FROM parent.state WHERE name NOT IN ('text_done', 'text_last')",
)


def make_child(parent: Path, child: Path, low: int, high: int) -> None:
    """Make a database with the documents whose hashes are from `low` to below `high`, as of one moment.

    Labels, numbers and the applied id are the parent's, and what it has seen is kept: its writes go on in the child.
    """
    connection = connect(child)
    try:
        connection.create_function("hashed", 1, hash_of_document, deterministic=True)
        connection.executescript(SCHEMA)
        connection.execute("ATTACH DATABASE ? AS parent", (str(parent),))
        connection.execute("BEGIN")
        for statement in _TABLES:
            connection.execute(statement, (low, high) if "?1" in statement else ())
        connection.execute("COMMIT")
        connection.execute("DETACH DATABASE parent")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    finally:
        connection.close()
