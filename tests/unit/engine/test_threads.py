"""Importing the engine bounds how long OpenMP's threads spin."""

from __future__ import annotations

import importlib
import os

import pytest

import engine


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_spinning_is_bounded(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None
) -> None:
    """OpenMP's threads spin for 1,000 turns, unless the environment says otherwise."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # put back after the test, with what the import sets
    monkeypatch.delenv("GOMP_SPINCOUNT")
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    importlib.reload(engine)

    assert os.environ.get("GOMP_SPINCOUNT") == spins
