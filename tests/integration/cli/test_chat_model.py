"""Which chat model `spillway up` serves, and what it says where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import chat_model
from common.config import WorkerConfig
from common.errors import ConfigError
from tests.integration.cli.conftest import Spillway


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that looks like a model's."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"")
    return made


def test_a_path_a_hub_id_or_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is configured is served: a path by its absolute one, a hub id as it is, `none` not at all."""
    (file := place / "model.gguf").write_bytes(b"GGUF")
    assert chat_model.choose(WorkerConfig(chat_model=str(file))).value == str(file)
    assert chat_model.choose(WorkerConfig(chat_model=str(place))).value == str(place)
    monkeypatch.setattr("cli.model_store.find", lambda name: place if name == "org/name" else None)
    assert chat_model.choose(WorkerConfig(chat_model="org/name")).value == "org/name"
    with pytest.raises(ConfigError, match=r"not downloaded; .* `spillway models pull org/other`"):
        chat_model.choose(WorkerConfig(chat_model="org/other"))
    assert chat_model.choose(WorkerConfig(chat_model="none")).value == ""


def test_the_shipped_one_is_the_default(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wish the shipped model is served, where its weights are; else a sentence says what is missing."""
    monkeypatch.setattr(chat_model, "shipped", lambda: place)
    assert chat_model.choose(WorkerConfig()).value == str(place)

    (place / "model.safetensors").unlink()
    chosen = chat_model.choose(WorkerConfig())
    assert chosen.value == ""
    assert str(place) in chosen.shown
    assert "SPILLWAY_CHAT_MODEL" in chosen.shown


@pytest.mark.parametrize(
    "asked", ["/no/such/place", "./here", "a/b/c", "~/nothing-here", "a b", "no.gguf", "my/no.gguf"]
)
def test_what_cannot_be_one(asked: str) -> None:
    """A path that is none, and what is neither path nor hub id, is refused with what is expected."""
    with pytest.raises(ConfigError, match="expected a model's directory, a GGUF"):
        chat_model.choose(WorkerConfig(chat_model=asked))


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    """A directory that holds no model is refused, and so is a file of another kind."""
    (other := tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(ConfigError, match="no GGUF file; expected"):
        chat_model.choose(WorkerConfig(chat_model=str(other)))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        chat_model.choose(WorkerConfig(chat_model=str(tmp_path)))


def test_up_refuses_and_status_shows(stubbed: Spillway) -> None:
    """`up` refuses a wrong model before it starts anything; `status` shows the right one."""
    refused = stubbed.run("up", "--port", "0", SPILLWAY_CHAT_MODEL="/no/such/place")
    assert refused.returncode == 2
    assert "SPILLWAY_CHAT_MODEL is '/no/such/place': no such directory or file" in refused.stderr

    stubbed.up("--model", "some/model", SPILLWAY_CHAT_MODEL="another/model", SPILLWAY_DEVICE="sim")
    assert stubbed.status()["chat_model"] == "some/model"
    assert "chat model         some/model" in stubbed.run("status").stdout
