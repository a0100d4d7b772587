"""Model directories of RETRO-type models: `config.json`, `model.safetensors`, and the tokenizer of the chat model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from common.errors import ConfigError
from engine.models.retro.network import RetroConfig, RetroNetwork

MODELS = Path(__file__).resolve().parents[3] / "models"
SHIPPED = MODELS / "retro"
KIND = "spillway-retro"


def load_retro(directory: Path = SHIPPED) -> RetroNetwork:
    """Return the network of a directory, in float32, ready to generate; ConfigError says what is missing or wrong."""
    try:
        given: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: expected a config.json: {error}") from error
    names = {field.name for field in dataclasses.fields(RetroConfig)}
    if not isinstance(given, dict) or given.get("model_type") != KIND or not names <= given.keys():
        raise ConfigError(f"{directory}/config.json: expected model_type {KIND} and its fields")
    shape = {name: given[name] for name in names}
    try:
        network = RetroNetwork(RetroConfig(**shape | {"cross": tuple(given["cross"])}))
        network.load_state_dict(load_file(directory / "model.safetensors"))
    except (OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{directory}: expected the weights of its config: {error}") from error
    return network.float().eval()


def save_retro(network: RetroNetwork, directory: Path) -> None:
    """Write a network's weights, in bfloat16, and its shape into a directory that exists."""
    half = {n: w.detach().to(torch.bfloat16).contiguous() for n, w in network.state_dict().items()}
    save_file(half, directory / "model.safetensors", {"format": "pt"})
    config = {"model_type": KIND, **dataclasses.asdict(network.config)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer() -> Tokenizer:
    """Return the tokenizer of the chat model that ships, which the shipped RETRO-type model shares."""
    return Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
