"""The directory of one replica: its lock, its name on the bus, and each collection's record, placement and shards.

From the records and placements the replica fills a registry that was wiped.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from common import log
from common.errors import ConfigError
from common.ids import ulid
from common.wire.message import BadMessage, decode, encode
from common.wire.registry import CollectionPlacement, CollectionRecord
from services.vector_search.snapshot import settle
from services.vector_search.write_log import sync_path

_RECORD, _PLACEMENT = "collection.msgpack", "placement.msgpack"
_log = log.get("vector_search")


class ReplicaDirectory:
    """The files of one replica under `root`; shard n of a collection lies in `<root>/<collection>/<n>`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = -1

    def lock(self) -> None:
        """Make the directory if need be, and lock it for this process; ConfigError if another process has it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            held = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{self.root}: {error.strerror}; expected a directory to write to"
            ) from error
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(held)
            raise ConfigError(
                f"{self.root} is in use by another vector_search; give each replica its own --replica or --data-dir"
            ) from error
        self._lock = held

    def unlock(self) -> None:
        """Unlock the directory, so that another process may take it."""
        os.close(self._lock)
        self._lock = -1

    def name(self) -> str:
        """Return the replica's name on the bus, which the directory keeps from start to start."""
        path = self.root / "replica"
        try:
            name = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            name = ""
        if not name:
            name = f"r-{ulid()[-12:]}"
            _write(path, name.encode())
        return name

    def shard(self, collection: str, number: int) -> Path:
        """Return the directory of one shard."""
        return self.root / collection / str(number)

    def holds(self, collection: str) -> bool:
        """Return whether there is a directory of a collection."""
        return (self.root / collection).exists()

    def records(self) -> list[CollectionRecord]:
        """Return the record of every collection; one that cannot be read is logged and left out."""
        found = []
        for path in sorted(self.root.glob(f"*/{_RECORD}")):
            try:
                found.append(decode(path.read_bytes(), CollectionRecord))
            except (OSError, BadMessage) as error:
                _log.error("record_unreadable", path=str(path), why=str(error))
        return found

    def placements(self) -> list[CollectionPlacement]:
        """Return the placement of every placed collection, as it was last known; an unreadable one is left out."""
        found = []
        for path in sorted(self.root.glob(f"*/{_PLACEMENT}")):
            try:
                found.append(decode(path.read_bytes(), CollectionPlacement))
            except (OSError, BadMessage) as error:
                _log.error("placement_unreadable", path=str(path), why=str(error))
        return found

    def save_placement(self, placement: CollectionPlacement) -> None:
        """Keep a placement beside its collection's record; OSError if it cannot be written."""
        _write(self.root / placement.collection / _PLACEMENT, encode(placement))

    def quantizer(
        self, collection: str, version: str, offset: int = 0, most: int = -1
    ) -> bytes | None:
        """Return up to `most` bytes (-1: all) of a quantizer from `offset` on; None without its file."""
        try:
            with self._quantizer(collection, version).open("rb") as file:
                file.seek(offset)
                return file.read(most)
        except FileNotFoundError:
            return None

    def save_quantizer(self, collection: str, version: str, data: bytes) -> None:
        """Keep a collection's quantizer, and delete earlier ones; OSError if it cannot be written."""
        path = self._quantizer(collection, version)
        if not path.exists():
            _write(path, data)
        for other in path.parent.glob("quantizer.*"):
            if other != path:
                other.unlink(missing_ok=True)

    def _quantizer(self, collection: str, version: str) -> Path:
        return self.root / collection / f"quantizer.{version}"

    def numbers(self, collection: str) -> set[int]:
        """Return the numbers of a collection's shards whose files are complete."""
        return {
            int(path.name) for path in (self.root / collection).glob("*") if path.name.isdigit()
        }

    def unfinished(self, collection: str, number: int) -> Path:
        """Return an empty directory for a new shard's files, which `finish` renames to the shard's directory."""
        path = self._unfinished(collection, number)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, collection: str, number: int) -> None:
        """Sync the directory of `unfinished` and rename it to the shard's; an OSError leaves it under its old name."""
        path = self._unfinished(collection, number)
        for file in path.iterdir():
            sync_path(file)
        sync_path(path)
        target = self.shard(collection, number)
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
        sync_path(target.parent)

    def _unfinished(self, collection: str, number: int) -> Path:
        return self.root / collection / f"{number}.unfinished"

    def clear(self, *suffixes: str) -> None:
        """Delete unfinished shards of an earlier process, and directories with these suffixes beside the shards."""
        for suffix in (*suffixes, ".unfinished", ".gone"):
            for path in self.root.glob(f"*/[0-9]*{suffix}"):
                shutil.rmtree(path, ignore_errors=True)

    def remove_shard(self, collection: str, number: int) -> None:
        """Delete one shard's files, finished or not."""
        path = self.shard(collection, number)
        gone = path.with_name(f"{number}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        if path.exists():
            path.rename(gone)
        for each in (gone, self._unfinished(collection, number)):
            shutil.rmtree(each, ignore_errors=True)

    def save_record(self, record: CollectionRecord) -> None:
        """Keep a collection's record in its directory, made if need be; OSError if it cannot be written."""
        directory = self.root / record.id
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / _RECORD, encode(record))

    def remove(self, collection: str) -> None:
        """Delete a collection's files."""
        gone = self.root / f".{collection}.gone"
        try:
            (self.root / collection).replace(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    path.with_name(path.name + ".tmp").write_bytes(data)
    settle(path)
    sync_path(path.parent)
