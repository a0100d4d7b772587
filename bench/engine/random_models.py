"""Small random generators written as Hugging Face directories, with transformers as their author and oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
    _VARY[family](chosen, _Draw(draw, dim, draw.choice((5, 32, 33, 50, 64, 100))))
    return chosen


def windowed(family: str, seed: int) -> dict[str, Any]:
    """Return a configuration like `settings` in which layers with and without a window alternate, if a family can.

    All layers of Mistral and Phi have one.
    """
    chosen = settings(family, seed)
    if family in {"mistral", "phi3"}:
        return chosen | {"sliding_window": 40}
    if "sliding_window" in chosen or family.startswith("qwen"):
        chosen |= {
            "use_sliding_window": True,
            "sliding_window": 50,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        }
    if family == "smollm3":
        chosen["no_rope_layers"] = [0, 1, 1]
    return chosen


class _Draw(NamedTuple):
    """What a family's own fields are drawn with."""

    draw: random.Random
    dim: int
    window: int


def _vary_llama(chosen: dict[str, Any], by: _Draw) -> None:
    chosen["head_dim"] = by.dim
    chosen["attention_bias"] = by.draw.random() < 0.5
    chosen["mlp_bias"] = by.draw.random() < 0.5


def _vary_mistral(chosen: dict[str, Any], by: _Draw) -> None:
    chosen["head_dim"] = by.dim
    chosen["sliding_window"] = by.draw.choice((None, by.window, by.window))


def _vary_qwen2(chosen: dict[str, Any], by: _Draw) -> None:
    if by.draw.random() < 0.75:
        chosen["use_sliding_window"] = True
        chosen["sliding_window"] = by.window
        chosen["max_window_layers"] = by.draw.randrange(chosen["num_hidden_layers"] + 1)


def _vary_qwen3(chosen: dict[str, Any], by: _Draw) -> None:
    chosen["head_dim"] = by.dim
    chosen["attention_bias"] = by.draw.random() < 0.5
    _vary_qwen2(chosen, by)


def _vary_gemma2(chosen: dict[str, Any], by: _Draw) -> None:
    chosen["head_dim"] = by.dim
    chosen["attention_bias"] = by.draw.random() < 0.5
    chosen["sliding_window"] = by.window
    chosen["hidden_activation"] = by.draw.choice(("gelu_pytorch_tanh", "gelu", "silu"))
    chosen["query_pre_attn_scalar"] = by.draw.choice((by.dim, 5, 144))
    chosen["attn_logit_softcapping"] = by.draw.choice((None, 2.0, 50.0))
    chosen["final_logit_softcapping"] = by.draw.choice((None, 3.0, 30.0))


def _vary_gemma3(chosen: dict[str, Any], by: _Draw) -> None:
    _vary_gemma2(chosen, by)
    chosen["sliding_window_pattern"] = by.draw.choice((2, 3, 6))
    chosen["rope_parameters"] = {
        "full_attention": chosen["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }


def _vary_phi3(chosen: dict[str, Any], by: _Draw) -> None:
    chosen["hidden_size"] = 16 * chosen["num_attention_heads"]
    chosen["sliding_window"] = by.draw.choice((None, by.window, by.window))
    chosen["original_max_position_embeddings"] = by.draw.choice((100, 256))
    share = by.draw.choice((1.0, 0.75, 0.5, 0.4))
    pairs = -(-int(16 * share) // 2)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if by.draw.random() < 0.7:
        rope["rope_type"] = "longrope"
        rope["short_factor"] = [by.draw.uniform(1, 2) for _ in range(pairs)]
        rope["long_factor"] = [by.draw.uniform(2, 9) for _ in range(pairs)]
    chosen["rope_parameters"] = {**rope, "partial_rotary_factor": share}


def _vary_olmo2(chosen: dict[str, Any], by: _Draw) -> None:
    chosen["attention_bias"] = by.draw.random() < 0.5


def _vary_granite(chosen: dict[str, Any], by: _Draw) -> None:
    chosen["attention_bias"] = by.draw.random() < 0.5
    chosen["mlp_bias"] = by.draw.random() < 0.5
    chosen["embedding_multiplier"] = by.draw.choice((1.0, 12.0, 0.7))
    chosen["attention_multiplier"] = by.draw.choice((0.015625, 0.3))
    chosen["residual_multiplier"] = by.draw.choice((0.22, 1.0))
    chosen["logits_scaling"] = by.draw.choice((8.0, 1.0, 0.5))


def _vary_smollm3(chosen: dict[str, Any], by: _Draw) -> None:
    chosen["attention_bias"] = by.draw.random() < 0.5
    chosen["mlp_bias"] = by.draw.random() < 0.5
    chosen["no_rope_layer_interval"] = by.draw.choice((2, 3, 4))
    if by.draw.random() < 0.5:
        chosen["no_rope_layers"] = [
            by.draw.randrange(2) for _ in range(chosen["num_hidden_layers"])
        ]
    chosen["sliding_window"] = by.window
    chosen["use_sliding_window"] = by.draw.random() < 0.5


_VARY: dict[str, Callable[[dict[str, Any], _Draw], None]] = {
    "llama": _vary_llama,
    "qwen2": _vary_qwen2,
    "qwen3": _vary_qwen3,
    "mistral": _vary_mistral,
    "gemma2": _vary_gemma2,
    "gemma3_text": _vary_gemma3,
    "phi3": _vary_phi3,
    "olmo2": _vary_olmo2,
    "granite": _vary_granite,
    "smollm3": _vary_smollm3,
}
FAMILIES = tuple(_VARY)


def write(
    directory: Path, family: str, chosen: dict[str, Any], *, seed: int = 1, shards: int = 1
) -> Any:
    """Write a random model with a tokenizer of words w0, w1, …; return transformers' own, fp32, in eval mode."""
    import transformers  # noqa: PLC0415 - slow to import, and needed only here

    config = transformers.AutoConfig.for_model(family, **chosen)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    make: Any = transformers.AutoModelForCausalLM.from_config
    # Eager: some releases of transformers let torch's fused attention drop Gemma's soft cap on CUDA.
    model = make(config, attn_implementation="eager").float().eval()
    centre = 0.0 if family.startswith("gemma") else 1.0  # of the weights of norms
    with torch.no_grad():
        for (
            name,
            weight,
        ) in model.named_parameters():  # fresh ones are all 0 or 1, which hides errors
            if name.endswith((".bias", "norm.weight")):
                middle = 0.0 if name.endswith(".bias") else centre
                weight.copy_(middle + 0.3 * torch.randn(weight.shape, generator=generator))
    size = sum(weight.numel() * 4 for weight in model.parameters())
    model.save_pretrained(directory, max_shard_size=size // shards + 1 if shards > 1 else "5GB")
    words = {f"w{number}": number for number in range(config.get_text_config().vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def oracle(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return transformers' fp32 logits (tokens, vocabulary) of one sequence, on the host."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens], device=model.device)).logits[0].float()
    return logits.cpu()
