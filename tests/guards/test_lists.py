"""Routes, settings and metrics are those that were accepted; `python -m tests.guards.names` accepts a change."""

from __future__ import annotations

import difflib

import pytest
import yaml

from tests.guards import names
from tests.guards.checkout import ROOT


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """What this tree has."""
    return names.every()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.stem for path in names.PLACE.glob("*.txt")))
def test_names_are_those_accepted(name: str, found: dict[str, list[str]]) -> None:
    """No name is gone, new or changed without being accepted."""
    changed = list(difflib.unified_diff(names.load(name), found[name], "accepted", "found", n=0))
    assert changed == [], "\n".join([*changed, "accept it: python -m tests.guards.names"])


@pytest.mark.timeout(600)
def test_every_list_is_compared(found: dict[str, list[str]]) -> None:
    """No list goes without its file, and none is empty."""
    assert sorted(found) == sorted(path.stem for path in names.PLACE.glob("*.txt"))
    assert [name for name, lines in found.items() if not lines] == []


def test_the_routes_are_those_documented() -> None:
    """The application serves what docs/openapi.yaml names, and the dashboard."""
    document = yaml.safe_load((ROOT / "docs/openapi.yaml").read_text(encoding="utf-8"))
    documented = {
        f"{method.upper()} {path}"
        for path, item in document["paths"].items()
        for method in ("get", "put", "post", "patch", "delete")
        if method in item
    }
    assert set(names.routes()) - {"GET /", "GET /dashboard/{file}"} == documented
