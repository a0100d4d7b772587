"""A shard's files, damaged, and the errors that tell of it: right answers or a clear refusal, never a 500."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import errors
from common.errors import Unavailable
from services.router.queue.outcomes import rebuilt
from services.vector_search.shard import Shard
from tests.hostile.spoil import spoil
from tests.vector_search.samples import ask, document, shard, write

ROOT = Path(__file__).resolve().parents[2]


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


# -- errors between processes


def _raised() -> Iterator[tuple[str, str]]:
    for part in (
        "services/vector_search",
        "services/gpu_worker",
        "services/cpu_worker",
        "common/work",
        "common/ml",
    ):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    for word in node.keywords:
                        if word.arg == "code" and isinstance(word.value, ast.Constant):
                            yield node.func.id, str(word.value.value)


def test_codes_keep_their_status_across_the_bus() -> None:
    """An error a worker raises has the same status at the router: none becomes a 500 on its way."""
    raised = {(name, code) for name, code in _raised() if hasattr(errors, name)}
    assert raised
    for name, code in raised:
        assert rebuilt(code, "x").http_status == getattr(errors, name).http_status, (name, code)
