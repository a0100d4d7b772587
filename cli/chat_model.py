"""Choose the chat model of an instance: the configured one, else the one that ships, else none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from common.config import WorkerConfig
from common.errors import ConfigError

NONE = "none"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")


class ChatModel(NamedTuple):
    """The chat model for the gpu_worker (`value`: a path, a hub id, or "" for none) and for people (`shown`)."""

    value: str
    shown: str


def shipped() -> Path:
    """Return where the model that ships lies: beside this package, in a checkout and in an installation."""
    return Path(__file__).resolve().parent.parent / "models" / "demo"


def choose(config: WorkerConfig) -> ChatModel:
    """Return the model to serve; ConfigError if the configured one cannot be one.

    SPILLWAY_CHAT_MODEL (`--model`) is a directory, a GGUF file, a hub id, or `none`; without it the shipped model is
    served, if it is there.
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
    place = Path(asked).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ConfigError(
                f"SPILLWAY_CHAT_MODEL is {asked!r}: no config.json in it; expected a model's directory"
                " as Hugging Face has them, or a hub id"
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
    if not _HUB_ID.match(asked) or asked.endswith(".gguf"):
        raise ConfigError(
            f"SPILLWAY_CHAT_MODEL is {asked!r}: no such directory or file; expected a model's directory, a GGUF"
            " file, a hub id like org/name, or none"
        )
    return ChatModel(asked, asked)


def _short(place: Path) -> str:
    try:
        return str(place.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(place)
