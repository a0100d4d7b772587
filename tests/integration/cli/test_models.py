"""`spillway models`: pulled from a hub, listed, shown with what it will need, removed; a missing one is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import Spillway
from tests.support import gguf_files
from tests.support.hub_server import hub

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def _models(spillway: Spillway, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of `spillway models`, which knows no instance."""
    return subprocess.run(
        [sys.executable, "-m", "cli.main", "models", *words],
        cwd=spillway.cwd,
        env={**spillway.env, **env},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )


def test_pull_list_show_rm(stubbed: Spillway, tmp_path: Path) -> None:
    """A directory and one GGUF file come from the hub and are served from its cache, without the hub."""
    file = gguf_files.demo(tmp_path / "demo-Q4_K.gguf", lambda _: "Q4_K")
    models = {
        "some/demo": {name: (DEMO / name).read_bytes() for name in FILES},
        "some/demo-GGUF": {"demo-Q4_K.gguf": file.read_bytes(), "other.gguf": b"GGUF"},
    }
    cache: Any = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    missing = stubbed.run("up", "--port", "0", "--model", "some/demo", **cache)
    assert missing.returncode == 2
    assert "model 'some/demo' is not downloaded; expected" in missing.stderr
    assert "`spillway models pull some/demo`" in missing.stderr
    with hub(models) as url:
        online = cache | {"HF_ENDPOINT": url}
        for name in ("some/demo", "some/demo-GGUF/demo-Q4_K.gguf"):
            pulled = _models(stubbed, "pull", name, **online)
            assert pulled.returncode == 0, pulled.stderr
            assert pulled.stdout.splitlines()[-1] == f"spillway up --model {name}"
        assert _models(stubbed, "pull", "some/other", **online).returncode == 1
        only_files = _models(stubbed, "pull", "some/demo-GGUF", **online)
        assert "expected one file of it, as some/demo-GGUF/FILE.gguf" in only_files.stderr

    listed = json.loads(_models(stubbed, "list", "--json", **cache).stdout)
    assert [each["model"] for each in listed["downloaded"]] == ["some/demo", "some/demo-GGUF"]
    assert listed["downloaded"][1]["files"] == ["demo-Q4_K.gguf"]
    assert list(listed["good"]) == ["4", "8", "16", "80"]
    whole, packed = (
        json.loads(_models(stubbed, "show", name, "--json", **cache).stdout)
        for name in ("some/demo", "some/demo-GGUF/demo-Q4_K.gguf")
    )
    assert whole["parameters"] == packed["parameters"]
    assert whole["kind"] == "fp32"
    assert packed["kind"] == "Q4_K"
    assert packed["disk_bytes"] == file.stat().st_size
    assert 1.0 <= packed["weight_bytes"] / packed["disk_bytes"] <= 1.15
    assert packed["token_bytes"] == 2 * 5 * 8 * 32 * 2
    assert "spillway up --model" in _models(stubbed, "show", str(file), **cache).stdout

    stubbed.up("--model", "some/demo-GGUF/demo-Q4_K.gguf", **cache)
    assert stubbed.status()["chat_model"] == "some/demo-GGUF/demo-Q4_K.gguf"
    assert _models(stubbed, "rm", "some/demo", **cache).returncode == 0
    listed = json.loads(_models(stubbed, "list", "--json", **cache).stdout)
    assert [each["model"] for each in listed["downloaded"]] == ["some/demo-GGUF"]


@pytest.mark.parametrize(
    ("verb", "name", "sentence"),
    [
        ("pull", "nothing", "expected a hub id, org/name or org/name/FILE.gguf"),
        ("show", "no/such", "model 'no/such' is not downloaded; expected"),
        ("rm", "no/such", "model 'no/such' is not downloaded; expected"),
        ("rm", "./mine.gguf", "files of yours are yours to delete"),
    ],
)
def test_what_cannot_be_done(
    stubbed: Spillway, tmp_path: Path, verb: str, name: str, sentence: str
) -> None:
    """A name that is none, and a model that is not here, are told in a sentence."""
    done = _models(stubbed, verb, name, HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert sentence in done.stderr
