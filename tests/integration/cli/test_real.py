"""The product as a newcomer meets it: real services, a real folder, right results, and nothing lost by kill -9."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Spillway
from tests.support import gguf_files

TEXTS = {
    "dams.md": "# Dams\n\nA spillway carries the water that does not fit behind the dam safely past it.",
    "bread.md": "# Bread\n\nKnead the dough for ten minutes, let it rise, and bake it until it is brown.",
    "stars.md": "# Stars\n\nA star shines because hydrogen is fused into helium deep inside it.",
}


def _best(spillway: Spillway, question: str) -> str:
    done = spillway.run("search", "notes", question, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return Path((found["data"] if isinstance(found, dict) else found)[0]["id"]).name


@pytest.mark.timeout(300)
def test_first_steps(real: Spillway, tmp_path: Path) -> None:
    """up, ingest, search, chat; kill -9 of everything at once; the same answers again; down."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    real.up("--no-sample")
    assert "minilm" in real.run("models").stdout
    ingested = real.run("ingest", "notes", str(folder))
    assert ingested.returncode == 0, ingested.stderr
    assert _best(real, "how do I make a loaf?") == "bread.md"
    grounded = real.run("chat", "What does a spillway carry?", "--collection", "notes")
    assert grounded.returncode == 0, grounded.stderr
    assert "dams.md:" in grounded.stdout
    first = real.run("chat", "What can you do?", "--session", "new")
    session = first.stderr.split()[-1]
    assert first.stdout.strip()

    before = real.pids()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    real.until(
        lambda: real.status()["ready"] and not set(before.values()) & set(real.pids().values()), 120
    )

    assert _best(real, "why does the sun give light?") == "stars.md"
    assert _best(real, "how do I make a loaf?") == "bread.md"
    assert real.run("chat", "What can you do?").stdout == first.stdout
    second = real.run("chat", "And now?", "--session", session)
    assert second.returncode == 0, second.stderr
    shown = real.run("sessions", "show", session).stdout
    assert shown.index("user: What can you do?") < shown.index("user: And now?")
    assert real.run("down").returncode == 0
    assert real.processes() == []


@pytest.mark.timeout(300)
def test_a_model_file(real: Spillway, tmp_path: Path) -> None:
    """`up --model FILE.gguf` serves the file under its name: its template, its tokenizer and its weights."""
    file = gguf_files.demo(tmp_path / "My-Model-Q8_0.gguf", lambda _: "Q8_0")

    real.up("--no-sample", "--model", str(file))

    assert "my-model-q8-0  kind generate  context 4096" in real.run("models").stdout
    asked = real.run("chat", "What can you do?")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    assert real.run("down").returncode == 0
