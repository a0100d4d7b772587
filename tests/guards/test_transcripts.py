"""Every route answers what was recorded, but for ids and times."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.guards import plain, record
from tests.guards.checkout import ROOT, Checkout

NAMES = sorted(path.stem.replace("_", " ") for path in record.PLACE.glob("*.json"))


@pytest.fixture(scope="module")
def played() -> dict[str, dict[str, Any]]:
    """What this tree answers to the whole scenario."""
    return dict(record.transcripts(Checkout()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_recorded(name: str, played: dict[str, dict[str, Any]]) -> None:
    """`python -m tests.guards.record` accepts an intended change."""
    changed = list(plain.differences(record.load(name), played[name]))
    assert changed == [], "\n".join([*changed, "accept it: python -m tests.guards.record"])


@pytest.mark.timeout(600)
def test_every_transcript_is_compared(played: dict[str, dict[str, Any]]) -> None:
    """No part of the scenario goes without a recorded transcript."""
    assert sorted(played) == NAMES


SEVERAL = ("/move", "/drop", "/reset")  # tests/integration/router/test_placement.py does these
OFF = ("/metrics", "/openapi.json")  # tests/integration/router/test_other_clients.py turns these on


def test_every_operation_is_recorded() -> None:
    """Each method of each path of docs/openapi.yaml has an answer other than a refused method or key."""
    document = yaml.safe_load((ROOT / "docs/openapi.yaml").read_text(encoding="utf-8"))
    wanted = {
        f"{method.upper()} {path}"
        for path, item in document["paths"].items()
        for method in ("get", "post", "patch", "delete")
        if method in item
    }
    asked = {
        exchange["asked"].partition("?")[0]
        for name in NAMES
        for exchange in record.load(name).values()
        if isinstance(exchange, dict) and "asked" in exchange and _answered(exchange)
    }
    missing = [each for each in sorted(wanted) if not any(_fits(each, one) for one in asked)]

    assert missing == []


def _answered(exchange: dict[str, Any]) -> bool:
    """Return whether an exchange shows what an operation does; one process, as shipped, has to refuse some."""
    return exchange["status"] in {200, 201, 202} or exchange["asked"].endswith((*SEVERAL, *OFF))


def _fits(operation: str, asked: str) -> bool:
    """Return whether a request is one of an operation: its parts are the same, or stand for any."""
    parts, given = operation.split("/"), asked.split("/")
    return len(parts) == len(given) and all(
        part == one or (part.startswith("{") and one != "")
        for part, one in zip(parts, given, strict=True)
    )
