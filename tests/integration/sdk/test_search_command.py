"""`spillway search` as people use it: by meaning, by words, by both, and with hits that differ."""

from __future__ import annotations

import json
from typing import Any

import pytest
import spillway_client as sw

from tests.integration.sdk.conftest import Command, TalkingMesh

TEXTS = {
    "dam": "A spillway carries water past the dam.",
    "twin": "A spillway carries water past a dam.",
    "bread": "Knead the dough, let it rise, and bake it. Water it a little.",
    "code": "Error E4711 means that the disk is full.",
    "sun": "A star shines because hydrogen is fused into helium.",
    "sea": "The tide follows the moon.",
    "snow": "Flakes have six arms.",
    "tree": "Oaks grow slowly.",
}


@pytest.fixture(scope="module")
def texts(mesh: TalkingMesh) -> str:
    """A collection of texts, by name."""
    with sw.Spillway(mesh.url) as client:
        client.collections.create("words")
        client.documents("words").add([{"id": key, "text": text} for key, text in TEXTS.items()])
    return "words"


def found(command: Command, *words: str) -> dict[str, Any]:
    """Return what a search with --json says."""
    done = command.run("search", *words, "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def ids(told: dict[str, Any]) -> list[str]:
    return [hit["id"] for hit in told["data"]]


def test_modes(command: Command, texts: str) -> None:
    """Mode text finds the passages that hold the words; hybrid ranks those first, and finds others as well."""
    told = found(command, texts, "what does E4711 mean?", "--mode", "text")
    assert (told["mode"], told["path"], ids(told)) == ("text", "text", ["code"])
    told = found(command, texts, TEXTS["code"], "--mode", "hybrid", "-k", "4", "--scores")
    assert (told["mode"], ids(told)[0], len(told["data"])) == ("hybrid", "code", 4)
    assert set(told["data"][0]["scores"]) == {"vector", "text"}
    assert found(command, texts, TEXTS["code"])["mode"] == "vector"


def test_diversity(mesh: TalkingMesh, command: Command) -> None:
    """Hits that should differ are not the same passage twice."""
    with sw.Spillway(mesh.url) as client:
        client.collections.create("alike", model=None, dimension=2)
        rows = [
            {
                "id": key,
                "text": text,
                "vector": [1.0, 0.0] if key in {"dam", "twin"} else [0.0, 1.0],
            }
            for key, text in TEXTS.items()
        ]
        client.documents("alike").add(rows)
    words = ("alike", "spillway past dam, or dough", "--mode", "text", "-k", "2")
    assert set(ids(found(command, *words))) == {"dam", "twin"}
    assert "bread" in ids(found(command, *words, "--diversity", "1"))


def test_what_people_read(command: Command, texts: str) -> None:
    """Without --json: scores beside the passage where asked for, a sentence where nothing was found."""
    done = command.run("search", texts, "E4711", "--mode", "text", "--scores", "--partial")
    assert done.returncode == 0, done.stderr
    head, passage = done.stdout.splitlines()
    assert "  code:0-" in head
    assert "(text " in head
    assert passage.strip() == TEXTS["code"]
    words = ("search", texts, "dough", "--mode", "text")
    assert "nothing found" in command.run(*words, "--min-score", "99").stdout
    assert "nothing found" in command.run("search", texts, "glacier", "--mode", "text").stdout


@pytest.mark.parametrize("words", [["--mode", "words"], ["--diversity", "2"], ["--diversity", "x"]])
def test_bad_options(command: Command, texts: str, words: list[str]) -> None:
    """An option that makes no sense ends the command before anything is sent."""
    with pytest.raises(SystemExit) as ended:
        command.run("search", texts, "x", *words)
    assert ended.value.code == 2


def test_what_the_server_refuses(command: Command, texts: str) -> None:
    """The server's sentence is printed."""
    done = command.run("search", texts, "x", "--mode", "text", "--time-budget-ms", "5")
    assert done.returncode == 1
    assert "only in mode vector" in done.stderr
