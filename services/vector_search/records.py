"""The record of a collection beside its shard's files, so that a wiped registry can be filled again."""

from __future__ import annotations

import os
from pathlib import Path

from common import log
from common.ids import ulid
from common.wire.message import BadMessage, decode, encode
from common.wire.registry import CollectionRecord
from services.vector_search.write_log import sync_directory

_NAME = "collection.msgpack"
_log = log.get("vector_search")


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def save_record(directory: Path, record: CollectionRecord) -> None:
    """Keep a collection's record in its directory, made if need be; OSError if it cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / _NAME, encode(record))


def stored_records(root: Path) -> list[CollectionRecord]:
    """Return the records of every collection kept under `root`; one that cannot be read is logged and left out."""
    found = []
    for path in sorted(root.glob(f"*/{_NAME}")):
        try:
            found.append(decode(path.read_bytes(), CollectionRecord))
        except (OSError, BadMessage) as error:
            _log.error("record_unreadable", path=str(path), why=str(error))
    return found


def replica_name(root: Path) -> str:
    """Return the name these files are registered under on the bus, the same at every start."""
    path = root / "replica"
    try:
        name = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        name = ""
    if not name:
        name = f"r-{ulid()[-12:]}"
        _write(path, name.encode())
    return name
