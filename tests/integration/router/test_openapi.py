"""docs/openapi.yaml is what the router serves: the same routes, and answers that fit the document."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.conftest import PROFILE, SEED
from tests.guards.names import routes
from tests.support.mesh import ROOT, Mesh

DOCUMENT = ROOT / "docs/openapi.yaml"
VERBS = ("get", "post", "put", "delete", "patch")
CHECKS = "no_fault,status_code_conformance,content_type_conformance,response_schema_conformance"

# What schemathesis says at its end.
FUZZED = {"operations": r"Tested: +(\d+)", "requests": r"(\d+) generated"}


def _documented() -> set[tuple[str, str]]:
    paths: dict[str, Any] = yaml.safe_load(DOCUMENT.read_text())["paths"]
    return {(m.upper(), path) for path, item in paths.items() for m in item if m in VERBS}


def _parameter(name: str) -> list[dict[str, Any]]:
    """Return the schemas of every parameter of a name."""
    found: list[dict[str, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict) and node.get("name") == name and "schema" in node:
            found.append(node["schema"])
        for inner in node.values() if isinstance(node, dict) else node:
            if isinstance(inner, dict | list):
                walk(inner)

    walk(yaml.safe_load(DOCUMENT.read_text()))
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Last-Event-ID", "7.0"),
        ("last_event_id", "7.0"),
        ("last_event_id", "7"),
        ("Idempotency-Key", "order 66"),
        ("Idempotency-Key", "x"),
    ],
)
def test_a_parameters_pattern_takes_what_the_code_takes(name: str, value: str) -> None:
    """A client that keeps to the document may send all of it."""
    (schema,) = _parameter(name)
    assert re.search(schema["pattern"], value)


def test_the_document_names_every_route() -> None:
    """Routes of the application and of the document are the same."""
    served = {tuple(route.split(" ", 1)) for route in routes()}
    pages = {route for route in served if route[1] == "/" or route[1].startswith("/dashboard/")}

    assert served - pages == _documented()


@pytest.mark.parametrize("key", ["operationId", "summary"])
def test_operations_have_names_of_their_own(key: str) -> None:
    """Programs that make a client of the document name its functions after these."""
    paths = yaml.safe_load(DOCUMENT.read_text())["paths"]
    named = [item[verb][key] for item in paths.values() for verb in VERBS if verb in item]

    assert sorted(named) == sorted(set(named))


@pytest.mark.timeout(3600 if PROFILE == "soak" else 300)
def test_generated_requests_get_documented_answers(
    chatting: Mesh, record: Callable[[str, object], None]
) -> None:
    """Generated requests, valid and not: no crash, and only what the document says."""
    mesh = chatting
    body = b'{"name": "docs"}'
    urllib.request.urlopen(f"{mesh.url}/v1/collections", data=body, timeout=30).close()
    # Each field's values at and past its bounds, by thousands, are for the soak, as are many examples.
    phases, examples = ("coverage,fuzzing", "400") if PROFILE == "soak" else ("fuzzing", "3")
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(DOCUMENT), "--url", mesh.url]
    command += ["--max-examples", examples, "--phases", f"examples,{phases}"]
    command += ["--checks", CHECKS, "--request-timeout", "30", "--seed", str(SEED), "--no-color"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.support.fuzz", "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **hooks, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, cwd=mesh.directory, env=env, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    for what, pattern in FUZZED.items():
        if told := re.search(pattern, done.stdout):
            record(f"fuzzed {what}", told[1])
