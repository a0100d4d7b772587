"""`make soak`: which pieces there are, and that what has passed is not run again."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench import ROOT, suite

TEST = """
# soak
from pathlib import Path
HERE = Path(__file__).parent

def test_one(record_property):
    with (HERE / "ran").open("a") as ran:
        ran.write("one ")
    record_property("answers", 1200)

def test_two(record_property):
    record_property("answers", 34)
    with (HERE / "ran").open("a") as ran:
        ran.write("two ")
    assert (HERE / "mended").exists()
"""


@pytest.fixture
def soak() -> ModuleType:
    """The script as a module of its own."""
    spec = importlib.util.spec_from_file_location("soak_script", ROOT / "scripts" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_script"] = module
    spec.loader.exec_module(module)
    return module


def test_every_row_and_every_longer_test_is_a_piece(soak: ModuleType) -> None:
    """Rows of the benchmarks are pieces (F6's tests are themselves), and so is whatever the soak profile changes."""
    known = soak.pieces()

    assert {name.removeprefix("bench/") for name in known if name.startswith("bench/")} == (
        set(suite.SUITES) - {"F6"}
    )
    assert {
        "faults/bus/chaos",
        "integration/bus/sessions",
        "integration/hostile/random",
        "faults/engine/schema_kills",
        "faults/router/tool_loop_kills",
        "integration/router/openapi",
        "unit/engine/schedule",
    } <= set(known)
    for piece in known.values():
        assert bool(piece.path) is not bool(piece.words)
        assert not piece.path or (ROOT / piece.path).is_file()


def test_what_passed_is_not_run_again(
    soak: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A piece that failed goes on with what has not passed; its time adds up; one that passed is left alone."""
    (tmp_path / "tests" / "x").mkdir(parents=True)
    (tmp_path / "tests" / "x" / "test_a.py").write_text(TEST)
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "PLACE", tmp_path / ".soak")
    monkeypatch.setattr(soak, "commit", lambda: "abc")
    monkeypatch.setattr(sys, "argv", ["soak", "x"])
    ran = tmp_path / "tests" / "x" / "ran"

    assert soak.main() == 1
    assert "failed: x/a" in capsys.readouterr().out
    (tmp_path / "tests" / "x" / "mended").touch()
    assert soak.main() == 0
    assert ran.read_text() == "one two two "
    assert soak.main() == 0
    assert ran.read_text() == "one two two "
    state = json.loads((tmp_path / ".soak" / "state.json").read_text())["x/a"]
    assert (state["status"], state["runs"], state["left"]) == (0, 2, False)
    assert state["counts"] == {"answers": 1234}
    monkeypatch.setattr(sys, "argv", ["soak", "--list"])
    assert soak.main() == 0
    told = capsys.readouterr().out
    assert "x/a" in told
    assert "passed" in told
    assert "1,234 answers" in told
    assert f"1 of {len(soak.pieces())} pieces have passed at abc" in told


def test_unknown_piece_is_refused(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A piece that does not exist is refused with the way to those that do."""
    monkeypatch.setattr(sys, "argv", ["soak", "nothing"])

    assert soak.main() == 2
    assert "--list" in capsys.readouterr().err
