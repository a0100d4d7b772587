"""Models of known shape and random weights, written as Hugging Face directories on the machine that measures them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from engine.models.decoders.family import parse_decoder
from engine.models.decoders.weights import wanted

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 4096,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32_000,
    },
    "llama-85m": _LLAMA
    | {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 8192,
    },
    "llama-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 4096,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "tiny": _LLAMA
    | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
    },
}


def write(directory: Path, config: dict[str, Any], device: str, *, seed: int = 7) -> None:
    """Write a model of this configuration, bf16, its weights drawn on `device`; nothing if it is there already."""
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    spec = parse_decoder(config, where="config.json")
    generator = torch.Generator(device).manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, size in wanted(spec):
        if sum(each.nbytes for each in shards[-1].values()) > 4 << 30:
            shards.append({})
        noise = torch.randn(size, generator=generator, device=device) * size[-1] ** -0.5
        drawn = 1 + 0.1 * noise if name.endswith("norm.weight") else noise
        shards[-1][name] = drawn.to(torch.bfloat16).cpu()
    files = [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index = {name: file for file, tensors in zip(files, shards, strict=True) for name in tensors}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    words = {f"w{number}": number for number in range(spec.vocabulary)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    # Last: a directory with a config is whole.
    (directory / "config.json").write_text(json.dumps(config))
