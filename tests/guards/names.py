"""Names that others rely on: routes, settings, metrics. `python -m tests.guards.names` accepts an intended change."""

from __future__ import annotations

import ast
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from common.config import OTHER_NAMES, PREFIX, SERVICES, RouterConfig
from common.health import Health
from services.router.assembly import Core, http_apis
from services.router.http.app import application
from tests.guards.checkout import ROOT, Checkout, Instance

PLACE = Path(__file__).parent / "lists"
SOURCES = ("common", "services", "engine")
# One process of every service.
EVERY_SERVICE = {"SPILLWAY_OVERFLOW_WORKERS": "1"}


class _Absent:
    """A part that is never asked for anything: its attributes are absent parts, too."""

    def __getattr__(self, name: str) -> _Absent:
        return _Absent()

    def __call__(self, *_: object) -> _Absent:
        return _Absent()


def routes() -> Iterator[str]:
    """Yield method and path of every route that the router's application has."""
    config = RouterConfig()
    health = Health("router", instance="0", data_dir=config.data_dir, waits_for=())
    # A router that is not started: routes are declared before anything is asked of it.
    parts = Core(*[cast("Any", _Absent())] * len(Core._fields))
    absent = cast("Any", _Absent())
    apis = http_apis(config, parts, absent, absent, keys_on=False)
    for route in application(apis, health, absent, absent, config.max_body_bytes).router.routes():
        if route.method != "HEAD" and route.resource is not None:
            yield f"{route.method} {route.resource.canonical}"


def settings() -> Iterator[str]:
    """Yield each variable with its default, and what it may be."""
    for name in sorted(OTHER_NAMES):
        yield f"{PREFIX}{name}"
    for service in SERVICES:
        for field in msgspec.structs.fields(service):
            kind = str(field.type).replace("typing.", "").replace("msgspec.", "")
            yield f"{PREFIX}{field.name.upper()} = {field.default!r}: {_plain(kind)}"


def _plain(kind: str) -> str:
    return kind.removeprefix("<class '").removesuffix("'>")


def labels() -> Iterator[str]:
    """Yield each metric that the source declares, with its labels."""
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and (name := _metric(node)):
                    yield f"{name}{{{', '.join(_labels(node))}}}"


def _metric(call: ast.Call) -> str:
    """Return the metric that a call declares: a name, a sentence and whatever else; "" if none."""
    first = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant)]
    declares = len(first) == 2 and all(isinstance(each, str) for each in first)
    return str(first[0]) if declares and str(first[0]).startswith("spillway_") else ""


def _labels(call: ast.Call) -> list[str]:
    """Return what stands where labels do: texts, or one list of them."""
    given = [*call.args[2:], *(word.value for word in call.keywords if word.arg == "labelnames")]
    lists = [arg.elts for arg in given if isinstance(arg, ast.Tuple | ast.List)]
    texts: list[Any] = [each for each in (lists[0] if lists else given) if _is_text(each)]
    return [str(each.value) for each in texts]


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def metrics(instance: Instance) -> Iterator[str]:
    """Yield service, name and type of each metric that a running instance exports."""
    for path in (instance.data_dir / "run").glob("*.json"):
        port = instance.note(path.stem).get("health_port")
        if port:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
                lines = reply.read().decode().splitlines()
            service = instance.note(path.stem)["service"]
            yield from (
                f"{service} {line.removeprefix('# TYPE ')}"
                for line in lines
                if line.startswith("# TYPE spillway_")
            )


def every() -> dict[str, list[str]]:
    """Return every list by name, sorted; starts an instance for the metrics."""
    with tempfile.TemporaryDirectory(prefix="spillway-guard-") as folder:
        instance = Instance(Checkout(), Path(folder) / "data", **EVERY_SERVICE)
        try:
            exported = sorted(set(metrics(instance.start())))
        finally:
            instance.kill()
    found = {"routes": routes(), "settings": settings(), "labels": labels()}
    return {"metrics": exported, **{name: sorted(set(each)) for name, each in found.items()}}


def load(name: str) -> list[str]:
    """Return a list as it was accepted."""
    return (PLACE / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def main() -> None:
    """Write all lists anew."""
    for name, lines in every().items():
        (PLACE / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)}")


if __name__ == "__main__":
    main()
