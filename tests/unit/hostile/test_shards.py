"""A shard's files, damaged, and the errors that tell of it: right answers or a clear refusal, never a 500."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import Unavailable
from services.vector_search.shard import Shard
from tests.support.hostile.spoil import spoil
from tests.support.vectors import ask, document, shard, write

ROOT = Path(__file__).resolve().parents[3]


EYE = np.eye(16)
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"", "cut": lambda raw: raw[: len(raw) // 2], "random": lambda raw: os.urandom(len(raw)),
    "zeroed": lambda raw: b"\0" * len(raw), "grown": lambda raw: raw + os.urandom(5000),
    "flipped": lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_shard_files(damage: str, tmp_path: Path) -> None:
    """Each file of a shard, damaged: the shard opens with right answers, or is refused whole as damaged."""
    vectors = np.random.default_rng(1).standard_normal((200, 16))
    one = shard(tmp_path / "good", exact_below=50)
    one.apply("1-0", write(0, [document(str(n), v) for n, v in enumerate(vectors)]))
    one.sync()
    while one.maintain():
        pass
    one.snapshot()
    one.apply("2-0", write(1, [document("last", EYE[0])]))
    one.sync()
    one.close()
    for name in sorted(p.name for p in (tmp_path / "good" / "0").iterdir() if p.is_file()):
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(tmp_path / "good", copy)
        path = copy / "0" / name
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
        opened = _open(copy, exact_below=50)
        if opened is None:
            continue
        with contextlib.closing(opened), contextlib.suppress(Unavailable):
            found = opened.search(ask(vectors[7], 1)).hits[0]
            assert not found or found[0].id == "7" or opened.stats()["documents"] < 200, name


def _open(directory: Path, **fields: Any) -> Shard | None:
    """Open a shard, or return None if it is refused as damaged; any other error is a failure."""
    try:
        return shard(directory, **fields)
    except Unavailable as error:
        if error.code != "shard_damaged":
            raise
        return None


@pytest.mark.parametrize("name", ["documents.sqlite", "writes.0000000000", "snapshot.json", "../0"])
def test_shard_things_that_are_no_files(name: str, tmp_path: Path) -> None:
    """Directories, links and nothing where a shard's files belong: opened empty, or refused as damaged."""
    path = Path(os.path.normpath(tmp_path / "0" / name))
    path.parent.mkdir(exist_ok=True)
    for what in spoil(path):
        if what in {"a pipe", "a device without end"} and name != "../0":
            continue  # never made by a crash or a copy
        opened = _open(tmp_path)
        if opened is not None:
            opened.close()
