"""Nothing here reads, writes or overrides a private name of aiohttp: an update of it may drop or change any of them."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from services.router.http.connection import ClientConnection

ROOT = Path(__file__).parents[3]
FILES = sorted(
    path
    for folder in ("client/spillway_client", "common", "services", "cli", "loadgen", "planner")
    for path in (ROOT / folder).rglob("*.py")
    if "aiohttp" in path.read_text()
)


@functools.cache
def private_names() -> frozenset[str]:
    """Return every private name of aiohttp's public classes, those set in a constructor included."""
    names: set[str] = set()
    for module in (aiohttp, web):
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__.startswith("aiohttp."):
                names |= set(dir(kind)) | {
                    node.attr
                    for node in ast.walk(ast.parse(_source(kind)))
                    if isinstance(node, ast.Attribute)
                }
    return frozenset(n for n in names if n.startswith("_") and not n.startswith("__"))


def _source(kind: type) -> str:
    return inspect.cleandoc("\n" + inspect.getsource(kind))


def used(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of objects that are not the file's own, asked for by attribute or by text."""
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            itself = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if not itself and node.attr not in own:
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            by_text = node.func.id in {"getattr", "setattr", "hasattr"} and len(node.args) > 1
            if by_text and isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_an_aiohttp_object(path: Path) -> None:
    """No file that imports aiohttp touches a private name of one of its objects."""
    assert set(used(ast.parse(path.read_text()))) & private_names() == set()


def test_a_connection_overrides_public_names_only() -> None:
    """A private name of our connection is none of aiohttp's; each public method it overrides is there to override."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(ClientConnection)))
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    private = {name for name in touched if name.startswith("_") and not name.startswith("__")}
    methods = {
        name for name in vars(ClientConnection) if inspect.isfunction(vars(ClientConnection)[name])
    }

    assert (private | methods) & _of_the_base() == set()
    public = {name for name in methods if not name.startswith("_")} - {"begin"}
    assert public <= set(dir(RequestHandler))


def _of_the_base() -> set[str]:
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(RequestHandler)))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {n for n in names | set(dir(RequestHandler)) if n.startswith("_") and n[:2] != "__"}
