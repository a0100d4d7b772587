"""Small random generators written as Hugging Face directories, with transformers as their author and oracle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 128
CONTEXT = 512
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
)


def settings(family: str, seed: int) -> dict[str, Any]:
    """Return a random configuration of a family: heads, head size, biases, tying, rotation, windows."""
    draw = random.Random(f"{family} {seed}")
    kv_heads = draw.choice((1, 2, 4))
    heads = kv_heads * draw.choice((1, 2, 3))
    dim = draw.choice((8, 16, 24))
    layers = draw.choice((2, 3, 4))
    chosen: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * dim if draw.random() < 0.5 else heads * 16,
        "intermediate_size": draw.choice((48, 80)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": {
            "rope_theta": draw.choice((10_000.0, 1_000_000.0)),
            **draw.choice(ROPES),
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "initializer_range": 0.2,
    }
    window = draw.choice((5, 32, 33, 50, 64, 100))
    if family == "llama":
        chosen["head_dim"] = dim
        chosen["attention_bias"] = draw.random() < 0.5
        chosen["mlp_bias"] = draw.random() < 0.5
    elif family == "mistral":
        chosen["head_dim"] = dim
        chosen["sliding_window"] = draw.choice((None, window, window))
    else:
        if family == "qwen3":
            chosen["head_dim"] = dim
            chosen["attention_bias"] = draw.random() < 0.5
        if draw.random() < 0.75:
            chosen["use_sliding_window"] = True
            chosen["sliding_window"] = window
            chosen["max_window_layers"] = draw.randrange(layers + 1)
    return chosen


def windowed(family: str, seed: int) -> dict[str, Any]:
    """Return a configuration like `settings`; Qwen has layers with and without a window, all of Mistral's have one."""
    chosen = settings(family, seed)
    if family.startswith("qwen"):
        chosen |= {
            "use_sliding_window": True,
            "sliding_window": 50,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        }
    if family == "mistral":
        chosen["sliding_window"] = 40
    return chosen


def write(
    directory: Path, family: str, chosen: dict[str, Any], *, seed: int = 1, shards: int = 1
) -> Any:
    """Write a random model with a tokenizer of words w0, w1, …; return transformers' own, fp32, in eval mode."""
    import transformers  # noqa: PLC0415 - slow to import, and needed only here

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    config = getattr(transformers, f"{names[family]}Config")(**chosen)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for (
            name,
            weight,
        ) in model.named_parameters():  # fresh ones are all 0 or 1, which hides errors
            if name.endswith((".bias", "norm.weight")):
                middle = 0.0 if name.endswith(".bias") else 1.0
                weight.copy_(middle + 0.3 * torch.randn(weight.shape, generator=generator))
    size = sum(weight.numel() * 4 for weight in model.parameters())
    model.save_pretrained(directory, max_shard_size=size // shards + 1 if shards > 1 else "5GB")
    words = {f"w{number}": number for number in range(chosen["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def oracle(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return transformers' fp32 logits (tokens, vocabulary) of one sequence, on the host."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens], device=model.device)).logits[0].float()
    return logits.cpu()
