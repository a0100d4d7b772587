"""Snapshots of a shard's graph or lists, which save a start from building them, and the rows that a start loads.

The documents' database is its own snapshot once checkpointed; graph and lists can be built from it again.
Files are written under temporary names, synced, renamed, and listed with their checksums in a manifest, replaced last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from common.wire.registry import CollectionRecord
from services.vector_search import metrics
from services.vector_search.documents import Documents, StoredChunks
from services.vector_search.index.inverted_lists import InvertedLists
from services.vector_search.index.native_graph import NativeGraph, SearchGraph, load_graph
from services.vector_search.index.port import IndexSnapshot
from services.vector_search.index.rows import Floats, Ints, Metric, VectorRows, prepare
from services.vector_search.write_log import sync_path

_MANIFEST = "snapshot.json"
_READ_BYTES = 1 << 20
# Bytes of vectors read from the database at once; memory holds several copies of them meanwhile.
_PART_BYTES = 4 << 20


class Manifest(msgspec.Struct, frozen=True):
    """The files of the newest snapshot; checksums are xxh3-64 in hexadecimal digits.

    `graph` is the file of the graph or lists, by `kind`, and `ef` the effort of searches.
    """

    applied: str
    ef: int
    recall: float
    rows: int
    graph: str
    graph_sum: str
    labels: str
    labels_sum: str
    kind: str = "graph"


class SavedStructure(NamedTuple):
    """A graph or lists, the labels of the rows that they cover, and their recall."""

    structure: SearchGraph | InvertedLists
    labels: Ints
    recall: float


def file_sum(path: Path) -> str:
    """Return the xxh3-64 of a file's bytes in hexadecimal digits."""
    hasher = xxhash.xxh3_64()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            hasher.update(part)
    return hasher.hexdigest()


def settle(path: Path) -> None:
    """Sync the file `<path>.tmp` and rename it to `path`."""
    temporary = path.with_name(path.name + ".tmp")
    sync_path(temporary)
    temporary.replace(path)


def read_manifest(directory: Path) -> Manifest | None:
    """Return the newest manifest; None if it is missing or damaged."""
    try:
        head, _, body = (directory / _MANIFEST).read_bytes().partition(b"\n")
        if head.decode() != xxhash.xxh3_64_hexdigest(body):
            metrics.DAMAGED.labels(what="manifest").inc()
            return None
        return msgspec.json.decode(body, type=Manifest)
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, msgspec.MsgspecError):
        metrics.DAMAGED.labels(what="manifest").inc()
        return None


def save(directory: Path, saved: IndexSnapshot, applied: str) -> None:
    """Write a snapshot and remove the last one; an OSError or RuntimeError leaves the last one as it was."""
    names = [directory / f"graph.{applied}.bin", directory / f"labels.{applied}.npy"]
    temporary = [path.with_name(path.name + ".tmp") for path in names]
    try:
        saved.save(str(temporary[0]))
        with temporary[1].open("wb") as file:
            np.save(file, saved.labels)
        for path in names:
            settle(path)
        manifest = Manifest(
            applied=applied,
            ef=saved.effort,
            recall=saved.recall,
            rows=len(saved.labels),
            graph=names[0].name,
            graph_sum=file_sum(names[0]),
            labels=names[1].name,
            labels_sum=file_sum(names[1]),
            kind=saved.kind,
        )
        body = msgspec.json.encode(manifest)
        target = directory / _MANIFEST
        target.with_name(_MANIFEST + ".tmp").write_bytes(
            xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body
        )
        settle(target)
        sync_path(directory)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    clean(directory, manifest)


def clean(directory: Path, manifest: Manifest | None) -> None:
    """Remove files of snapshots that the manifest does not name."""
    current = {manifest.graph, manifest.labels} if manifest else set()
    for pattern in ("graph.*", "labels.*", "*.tmp"):
        for path in directory.glob(pattern):
            if path.name not in current:
                path.unlink(missing_ok=True)


def link(directory: Path, target: Path) -> None:
    """Give another directory the files of the newest snapshot, if there is one; such files are never changed."""
    manifest = read_manifest(directory)
    if manifest is None:
        return
    try:
        for name in (manifest.graph, manifest.labels, _MANIFEST):
            os.link(directory / name, target / name)
    except FileNotFoundError:  # replaced meanwhile: the graph is built again from the documents
        for path in target.glob("*"):
            path.unlink()


def load(directory: Path, dimension: int, metric: Metric, threads: int) -> SavedStructure | None:
    """Load the newest snapshot; None if it is missing or damaged: then the graph or lists are built again."""
    manifest = read_manifest(directory)
    clean(directory, manifest)
    if manifest is None or manifest.kind not in {"graph", "ivfpq"}:
        return None
    graph_path, labels_path = directory / manifest.graph, directory / manifest.labels
    try:
        sound = (
            file_sum(graph_path) == manifest.graph_sum
            and file_sum(labels_path) == manifest.labels_sum
        )
        if not sound:
            metrics.DAMAGED.labels(what="snapshot").inc()
            return None
        labels = np.load(labels_path)
        if manifest.kind == "ivfpq":
            lists = InvertedLists.load(graph_path)
            if (lists.quantizer.dimension, lists.quantizer.metric) != (dimension, metric):
                raise ValueError(f"{graph_path.name} is of another collection")
            return SavedStructure(lists, labels, manifest.recall)
        capacity = int(manifest.rows * 1.25) + 1
        graph = load_graph(graph_path, dimension, metric, capacity, threads)
    except (OSError, ValueError, RuntimeError):
        metrics.DAMAGED.labels(what="snapshot").inc()
        return None
    if graph is None:
        return None
    graph.set_ef(manifest.ef)
    return SavedStructure(graph, labels, manifest.recall)


def load_rows(
    documents: Documents,
    record: CollectionRecord,
    saved: SavedStructure | None,
    directory: Path | None = None,
) -> tuple[VectorRows, SearchGraph | InvertedLists | None, int]:
    """Return the rows (in `directory` if many), the saved graph or lists if they fit the rows, and the rows they cover.

    A chunk whose vector is damaged is left out of searches and counted.
    """
    stored = documents.labels()
    at_once = max(1, _PART_BYTES // (4 * record.dimension))
    if saved is not None and _fits(saved, stored):
        rows = _beside(documents.chunks(at_once), record, saved.labels, directory)
        if isinstance(saved.structure, NativeGraph):
            saved.structure.over(rows)
        return rows, saved.structure, len(saved.labels)
    rows = VectorRows(record.dimension, max(1024, len(stored)), directory)
    for part in documents.chunks(at_once):
        vectors, sound = _vectors(part, record)
        rows.append(vectors, part.labels[sound], part.numbers[sound])
    return rows, None, 0


def _fits(saved: SavedStructure, stored: Ints) -> bool:
    """Return whether a saved graph or lists cover every stored label up to their last one."""
    if not len(saved.labels):
        return False
    old = stored[stored <= saved.labels[-1]]
    return bool(np.isin(old, saved.labels).all())


def _vectors(part: StoredChunks, record: CollectionRecord) -> tuple[Floats, Ints]:
    size = record.dimension * 4
    sound = [i for i, good in enumerate(part.sound) if good and len(part.vectors[i]) == size]
    damaged = len(part.vectors) - len(sound)
    if damaged:
        metrics.DAMAGED.labels(what="vector").inc(damaged)
    joined = b"".join(part.vectors[i] for i in sound)
    vectors = np.frombuffer(joined, "<f4").reshape(-1, record.dimension)
    return prepare(vectors, record.metric), np.array(sound, np.int64)


def _beside(
    chunks: Iterator[StoredChunks],
    record: CollectionRecord,
    labels: Ints,
    directory: Path | None,
) -> VectorRows:
    """Return rows in the order of the saved labels, newer chunks last; rows whose chunk is gone stay empty and dead."""
    rows = VectorRows(record.dimension, int(len(labels) * 1.1) + 1024, directory)
    rows.append_empty(labels)
    for part in chunks:
        vectors, sound = _vectors(part, record)
        names, numbers = part.labels[sound], part.numbers[sound]
        old = names <= labels[-1]
        rows.fill(np.searchsorted(labels, names[old]), vectors[old], numbers[old])
        if not old.all():
            rows.append(vectors[~old], names[~old], numbers[~old])
    return rows
