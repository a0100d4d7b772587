"""`spillway profile`: what it measures on an instance of its own, and what cannot be asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import main
from planner.inventory import read_inventory
from tests.integration.cli.conftest import Spillway


def test_a_profile_is_an_inventory(real: Spillway, tmp_path: Path) -> None:
    """Every stage has its points, and the workers' costs and the machine stand beside them; nothing is left running."""
    out = tmp_path / "profile.json"
    words = ["--quick", "--threads", "1", "--prompt-tokens", "32", "--answer-tokens", "4"]
    sim = {"SPILLWAY_DEVICE": "sim", "SPILLWAY_CHAT_MODEL": "sim-chat", "SPILLWAY_SAMPLE": "no"}
    done = real.run_alone("profile", "--out", str(out), *words, **sim)
    assert done.returncode == 0, done.stderr
    found = read_inventory(out.read_bytes(), "profile.json")

    assert {(each.stage, each.units, each.batch) for each in found.profile} == {
        (stage, 1, batch)
        for stage in ("embed", "retrieval", "prefix", "decode")
        for batch in (1, 2)
    }
    assert {each.kind for each in found.costs} == {"embed", "chat"}
    assert found.machine is not None
    assert "prefix" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt-tokens", "0"], "--prompt-tokens is '0': expected a whole number from 1"),
        (["--threads", "1,x"], "--threads is 'x': expected a whole number from 1"),
        (["--collection", "docs"], "--collection is given without --url"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9: "),
    ],
)
def test_what_cannot_be_measured_is_said(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and one sentence."""
    assert main.main(["profile", *words]) == 2
    assert sentence in capsys.readouterr().err
