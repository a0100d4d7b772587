"""The choice of an instance's chat model: the configured one, else the shipped one, else none."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cli import model_store
from common.config import WorkerConfig
from common.errors import ConfigError

NONE = "none"


class ChatModel(NamedTuple):
    """The chat model for the gpu_worker (`value`: a path, a hub id, or "" for none) and for people (`shown`)."""

    value: str
    shown: str


def shipped() -> Path:
    """Return the directory of the shipped model: beside this package, in a checkout and in an installation."""
    return Path(__file__).resolve().parent.parent / "models" / "demo"


def choose(config: WorkerConfig) -> ChatModel:
    """Return the model to serve; ConfigError if the configured one is no chat model.

    SPILLWAY_CHAT_MODEL (`--model`) is a directory, a GGUF file, a hub id, or `none`; without it the shipped model is
    served, if its files are present.
    """
    asked = config.chat_model
    if asked == NONE:
        return ChatModel("", "none (SPILLWAY_CHAT_MODEL)")
    if not asked:
        place = shipped()
        if (place / "config.json").is_file() and any(place.glob("*.safetensors")):
            return ChatModel(str(place), _short(place))
        return ChatModel(
            "",
            f"none: {place} holds no weights; SPILLWAY_CHAT_MODEL names a directory, a GGUF file or a hub id",
        )
    if config.device == "sim":
        return ChatModel(asked, asked)
    place = Path(asked).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ConfigError(
                f"SPILLWAY_CHAT_MODEL is {asked!r}: no config.json in it; expected a directory with config.json,"
                " safetensors and tokenizer.json, a GGUF file, a hub id, or none"
            )
        return ChatModel(str(place.resolve()), _short(place))
    if place.is_file():
        with place.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(
                    f"SPILLWAY_CHAT_MODEL is {asked!r}: no GGUF file; expected a model's directory, a GGUF file, a"
                    " hub id, or none"
                )
        return ChatModel(str(place.resolve()), _short(place))
    if model_store.hub_name(asked) is None:
        raise ConfigError(
            f"SPILLWAY_CHAT_MODEL is {asked!r}: no such directory or file; expected a model's directory, a GGUF"
            " file, a hub id like org/name, or none"
        )
    found = model_store.find(asked)
    if found is None:
        raise model_store.missing(asked)
    return ChatModel(str(found) if found.is_file() else asked, asked)


def _short(place: Path) -> str:
    try:
        return str(place.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(place)
