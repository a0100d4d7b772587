"""Snapshots of the graph, so that a start need not build it again.

The documents' database is its own snapshot once checkpointed; the graph is only a faster way to the same vectors.
Files are written beside, synced, renamed, and named with their checksum in a manifest that is replaced last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from services.vector_search import metrics
from services.vector_search.index.graph import Graph
from services.vector_search.index.rows import Ints, Metric
from services.vector_search.write_log import sync_directory

_MANIFEST = "snapshot.json"
_READ_BYTES = 1 << 20


class Manifest(msgspec.Struct, frozen=True):
    """What the newest snapshot consists of; checksums are xxh3-64 in hex."""

    applied: str
    ef: int
    recall: float
    rows: int
    graph: str
    graph_sum: str
    labels: str
    labels_sum: str


class Loaded(NamedTuple):
    """A graph and the label of each of its rows."""

    graph: Graph
    labels: Ints
    recall: float


def _file_sum(path: Path) -> str:
    hasher = xxhash.xxh3_64()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            hasher.update(part)
    return hasher.hexdigest()


def _settle(path: Path) -> None:
    """Sync a file written under a temporary name and give it its own."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)


def read_manifest(directory: Path) -> Manifest | None:
    """Return the newest manifest, None if there is none that is sound."""
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


def save(directory: Path, graph: Graph, labels: Ints, applied: str, recall: float) -> None:
    """Write a snapshot and remove the one before; OSError or RuntimeError leaves that one as it was."""
    names = [directory / f"graph.{applied}.bin", directory / f"labels.{applied}.npy"]
    temporary = [path.with_name(path.name + ".tmp") for path in names]
    try:
        graph.save(str(temporary[0]))
        with temporary[1].open("wb") as file:
            np.save(file, labels)
        for path in names:
            _settle(path)
        manifest = Manifest(
            applied=applied,
            ef=graph.ef,
            recall=recall,
            rows=len(labels),
            graph=names[0].name,
            graph_sum=_file_sum(names[0]),
            labels=names[1].name,
            labels_sum=_file_sum(names[1]),
        )
        body = msgspec.json.encode(manifest)
        target = directory / _MANIFEST
        target.with_name(_MANIFEST + ".tmp").write_bytes(
            xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body
        )
        _settle(target)
        sync_directory(directory)
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


def load(directory: Path, dimension: int, metric: Metric, threads: int) -> Loaded | None:
    """Load the newest snapshot; None if there is none or it is damaged (the graph is then built again)."""
    manifest = read_manifest(directory)
    clean(directory, manifest)
    if manifest is None:
        return None
    graph_path, labels_path = directory / manifest.graph, directory / manifest.labels
    try:
        sound = (
            _file_sum(graph_path) == manifest.graph_sum
            and _file_sum(labels_path) == manifest.labels_sum
        )
        if not sound:
            metrics.DAMAGED.labels(what="snapshot").inc()
            return None
        labels = np.load(labels_path)
        capacity = int(manifest.rows * 1.25) + 1
        graph = Graph(dimension, metric, capacity, threads, path=str(graph_path))
    except (OSError, ValueError, RuntimeError):
        metrics.DAMAGED.labels(what="snapshot").inc()
        return None
    graph.set_ef(manifest.ef)
    return Loaded(graph, labels, manifest.recall)
