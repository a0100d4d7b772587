"""The rules of the rooms, read from the sources: who may import whom, and what a module or a class may not be."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVER = ("common", "engine", "services")
HEAVY = frozenset({"torch", "numpy", "transformers", "hnswlib", "faiss"})
# What a room never imports, neither at the top of a module nor within a function.
FORBIDDEN = {
    "common": {"engine", "services", "cli", "loadgen", "planner", "bench", "chaos", *HEAVY},
    "engine": {"services", "cli", "loadgen", "planner", "bench", "chaos"},
    "services": {"cli", "loadgen", "planner", "bench", "chaos"},
    "loadgen": {"engine", "services", "cli", "planner", "bench", "chaos"},
    "planner": {"common", "engine", "services", "cli", "loadgen", "bench", "chaos", *HEAVY},
}
# The parts of `common` that the engine, which knows no bus, is built on.
ENGINE_KNOWS = {
    "clock", "cost", "devices", "errors", "heap", "ids", "log", "native", "pages", "transport",
    "types",
}  # fmt: skip
MOST_PUBLIC_METHODS = 20
# How a docstring begins that tells a riddle instead of naming its subject.
RIDDLES = ("What", "Who", "How", "Where", "When", "By", "Which")
# Bases that make a plain declaration of a class, not a part of a larger object.
DECLARATIONS = {
    "Protocol", "Generic", "Struct", "NamedTuple", "TypedDict",
    "Enum", "IntEnum", "StrEnum", "IntFlag", "ABC", "Module", "Structure",
}  # fmt: skip


@cache
def trees(room: str) -> dict[str, ast.Module]:
    """Return the syntax tree of each file of a room."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_bytes())
        for path in sorted((ROOT / room).rglob("*.py"))
    }


def modules(*rooms: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield (file, syntax tree) of whole rooms."""
    for room in rooms:
        assert trees(room), f"the room {room} has no module"
        yield from trees(room).items()


def imports(*rooms: str) -> Iterator[tuple[str, str]]:
    """Yield (file, imported name with its module) of whole rooms, imports within functions too."""
    for name, tree in modules(*rooms):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}:{node.lineno}: expected an absolute import"
                yield from ((name, f"{node.module}.{alias.name}") for alias in node.names)


def classes(*rooms: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield (file, class) of every class at the top of a module."""
    for name, tree in modules(*rooms):
        yield from ((name, node) for node in tree.body if isinstance(node, ast.ClassDef))


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_only_what_it_may_know(room: str) -> None:
    """No room imports one that is built on it; `common` loads no heavy library."""
    found = {
        f"{name} imports {module.split('.')[0]}"
        for name, module in imports(room)
        if module.split(".")[0] in FORBIDDEN[room]
    }

    assert sorted(found) == []


def test_the_engine_knows_no_bus() -> None:
    """The engine is a library: of `common` it imports the parts that need no process around them."""
    found = {
        f"{name} imports {'.'.join(module.split('.')[:2])}"
        for name, module in imports("engine")
        if module.startswith("common.") and module.split(".")[1] not in ENGINE_KNOWS
    }

    assert sorted(found) == []


def test_no_service_imports_another() -> None:
    """A service imports itself and the adapters; the adapters import no service."""

    def service(dotted: str) -> str:
        return dotted.split(".")[1] if dotted.startswith("services.") else ""

    found = {
        f"{name} imports services.{other}"
        for name, module in imports("services")
        if (other := service(module))
        and other not in {service(name.removesuffix(".py").replace("/", ".")), "adapters"}
    }

    assert sorted(found) == []


def test_connections_to_redis_are_made_in_one_file() -> None:
    """redis-py is used in one file; elsewhere only its errors are known."""
    used = {
        name
        for name, module in imports(*SERVER)
        if module.split(".")[0] == "redis" and not module.startswith("redis.exceptions")
    }

    assert used == {"common/redis/address.py"}


def test_public_class_names_are_unique() -> None:
    """One name, one class: a reader who searches for a name finds one class."""
    found = defaultdict(list)
    for name, node in classes(*SERVER):
        if not node.name.startswith("_"):
            found[node.name].append(name)

    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def _base(node: ast.expr) -> str:
    """Return the last name of a base class: `nn.Module` is Module, `Generic[T]` is Generic."""
    inner = node.value if isinstance(node, ast.Subscript) else node
    return inner.attr if isinstance(inner, ast.Attribute) else ast.unparse(inner)


def test_large_objects_are_composed() -> None:
    """A class of ours is subclassed only if it is an interface; no class has three bases or is a mixin."""
    declared = {node.name: [_base(base) for base in node.bases] for _, node in classes(*SERVER)}

    def roots(name: str) -> set[str]:
        bases = declared.get(name)
        return {name} if bases is None else set().union(*map(roots, bases)) or {"object"}

    def interface(name: str) -> bool:
        """Tell whether a class of ours declares methods for others to implement, or only data."""
        return bool(roots(name) & (DECLARATIONS | {"Exception", "BaseException", "OSError"}))

    found = set()
    for name, node in classes(*SERVER):
        bases = [_base(base) for base in node.bases]
        ours = [base for base in bases if base in declared and not interface(base)]
        if ours or len(bases) > 2 or "mixin" in node.name.lower():
            found.add(f"{name}:{node.name}({', '.join(bases)})")

    assert sorted(found) == []


def _graph() -> dict[str, set[str]]:
    """Return which modules of the server each module imports."""
    names = {}
    for name, _ in modules(*SERVER):
        dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        names[name] = dotted
    known = set(names.values())
    graph: dict[str, set[str]] = {dotted: set() for dotted in known}
    for name, imported in imports(*SERVER):
        module = imported
        while module and module not in known:
            module = module.rpartition(".")[0]
        if module and module != names[name]:
            graph[names[name]].add(module)
    return graph


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for start in sorted(graph):
        if start in index:
            continue
        index[start] = low[start] = len(index)
        stack.append(start)
        work = [(start, iter(sorted(graph[start])))]
        while work:
            node, rest = work[-1]
            for child in rest:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    work.append((child, iter(sorted(graph[child]))))
                    break
                if child in stack:
                    low[node] = min(low[node], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    if len(stack) - cut > 1:
                        found.append(sorted(stack[cut:]))
                    del stack[cut:]
    return found


def test_circles_are_found() -> None:
    """The search finds two circles, and no third where imports only meet."""
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"e", "a"}}

    assert sorted(_circles(graph)) == [["a", "b", "c"], ["d", "e"]]


def test_modules_import_each_other_in_one_direction() -> None:
    """No module imports, by any way round, a module that imports it; imports within functions count."""
    assert _circles(_graph()) == []


def test_time_is_read_in_one_file() -> None:
    """`time.*` is called in common/clock.py only: everything else is given a clock, which tests can set."""
    found = {name for name, module in imports(*SERVER) if module.split(".")[0] == "time"}

    assert found == {"common/clock.py"}


def test_objects_are_small() -> None:
    """An object with more public methods than twenty is several objects."""
    found = set()
    for name, node in classes(*SERVER):
        public = [
            each.name
            for each in node.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            and not each.name.startswith("_")
        ]
        if len(public) > MOST_PUBLIC_METHODS:
            found.add(f"{name}:{node.name}")

    assert sorted(found) == []


def test_a_module_is_introduced_by_its_subject() -> None:
    """A module's docstring names the thing it is about, instead of asking for it."""
    found = {
        name
        for name, tree in modules(*SERVER)
        if (text := ast.get_docstring(tree)) and text.split()[0].strip(".,:") in RIDDLES
    }

    assert sorted(found) == []


def test_a_module_says_more_than_its_name() -> None:
    """A module's docstring tells what the module holds: one word only repeats its name."""
    found = {
        name for name, tree in modules(*SERVER) if len((ast.get_docstring(tree) or "").split()) < 4
    }

    assert sorted(found) == []


def test_the_router_admits_jobs_in_one_place() -> None:
    """Requests and the stages of workflows go through one controller: only there `bus.admission` is called."""
    callers = {
        name
        for name, tree in modules("services")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith("bus.admission.admit")
    }

    assert callers == {
        "services/router/admission/controller.py",
        "services/adapters/encode/depth_finder.py",  # its probes are a worker's, not a request's
    }
