"""Bad things that can lie where a file is expected."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def spoil(path: Path) -> Iterator[str]:
    """Put one bad thing after another where a file is expected; yields what it is."""
    contents = {
        "empty": b"", "binary": bytes(range(256)) * 40, "not UTF-8": b'{"a": "\xff"}', "half": b'{"timestamp": 1',
        "deep": b"[" * 200_000, "a list": b"[]", "a number": b"7", "null": b"null", "text": b"hello\n" * 1000,
        "a dict of nothing": b"{}", "NaN": b'{"timestamp": NaN, "pid": NaN}',
        "wrong types": b'{"timestamp": "x", "pid": [], "tables": 7, "url": 1, "weight_map": [1]}',
        "huge numbers": b'{"timestamp": 1e999, "pid": ' + b"9" * 4000 + b"}",
    }  # fmt: skip
    for name, content in contents.items():
        _remove(path)
        path.write_bytes(content)
        yield name
    makers: tuple[tuple[str, Callable[[], object]], ...] = (
        ("a directory", path.mkdir),
        ("a pipe", lambda: os.mkfifo(path)),
        ("a link to itself", lambda: path.symlink_to(path.name)),
        ("a device without end", lambda: path.symlink_to("/dev/zero")),
        ("nothing", lambda: None),
    )
    for name, make in makers:
        _remove(path)
        make()
        yield name
    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
