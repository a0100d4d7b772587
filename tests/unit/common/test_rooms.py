"""The rules of the rooms, read from the sources: what may import what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TORCH = ("common/ml/", "services/gpu_worker/compute/")


def _imports() -> Iterator[tuple[str, str]]:
    """Yield (file, imported module) of all of `common` and `services`, imports within functions too."""
    for path in sorted([*ROOT.glob("common/**/*.py"), *ROOT.glob("services/**/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}:{node.lineno}: expected an absolute import"
                yield from ((name, f"{node.module}.{alias.name}") for alias in node.names)


def _room(dotted: str) -> str:
    return ".".join(dotted.split(".")[:2])


def test_no_service_imports_another() -> None:
    """What services share lies in `common`, which imports none of them; torch is kept to two rooms."""
    found = list(_imports())
    strangers = [
        (name, module)
        for name, module in found
        if module.startswith("services") and _room(module) != _room(name.replace("/", "."))
    ]
    torch = [name for name, module in found if module.split(".")[0] == "torch"]

    assert len({name for name, _ in found}) > 100
    assert strangers == []
    assert [name for name in torch if not name.startswith(TORCH)] == []


def test_connections_to_redis_are_made_in_one_room() -> None:
    """redis-py is used in `common/redis` alone; elsewhere only its errors are known."""
    used = {
        name
        for name, module in _imports()
        if module.split(".")[0] == "redis" and not module.startswith("redis.exceptions")
    }
    assert used == {"common/redis/address.py"}
