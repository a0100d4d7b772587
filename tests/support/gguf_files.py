"""GGUF files written with the `gguf` package from Hugging Face directories, and read again by it: the oracle."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

from bench.engine import random_models

Floats = NDArray[np.float32]
TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
VALUES = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "olmo2": "olmo2", "granite": "granite", "smollm3": "smollm3",
}  # fmt: skip
# In these files rows of q and k are kept so that the rotation turns neighbours, where Hugging Face's turns halves.
NEIGHBOURS = ("llama", "granite", "smollm3")
TURNED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


def quantised(values: Floats, kind: str) -> NDArray[np.uint8]:
    """Return (outputs, bytes) of (outputs, inputs); K and IQ types, which the package cannot write, plainly."""
    values = np.ascontiguousarray(values, np.float32)
    if kind in {"Q4_K", "Q5_K"}:
        return _by_six_bits(values.reshape(-1, 8, 32), int(kind[1])).reshape(len(values), -1)
    if kind == "Q6_K":
        return _q6_k(values.reshape(-1, 16, 16)).reshape(len(values), -1)
    if kind == "IQ4_NL":
        return _iq4_nl(values.reshape(-1, 32)).reshape(len(values), -1)
    if kind == "IQ4_XS":
        return _iq4_xs(values.reshape(-1, 8, 32)).reshape(len(values), -1)
    packed = gguf.quants.quantize(values, GGMLQuantizationType[kind])
    return packed.view(np.uint8).reshape(len(values), -1)


def _over(values: Any, by: Any) -> Any:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _by_six_bits(x: Floats, bits: int) -> NDArray[np.uint8]:
    most = (1 << bits) - 1
    least = np.minimum(x.min(-1), 0)
    scale, minimum = (x.max(-1) - least) / most, -least
    heads = [(each.max(-1, keepdims=True) / 63).astype(np.float16) for each in (scale, minimum)]
    d, dmin = (each.astype(np.float32) for each in heads)
    sc, m = np.rint(_over(scale, d + 0 * scale)), np.rint(_over(minimum, dmin + 0 * minimum))
    sc, m = sc.clip(0, 63), m.clip(0, 63)
    q = np.rint(_over(x + (dmin * m)[..., None], (d * sc)[..., None] + 0 * x)).clip(0, most)
    q, sc, m = q.astype(np.uint8), sc.astype(np.uint8), m.astype(np.uint8)
    six = np.concatenate(
        (
            sc[:, :4] | sc[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
        ),
        axis=1,
    )
    low = q & 15
    nibbles = (low[:, 0::2] | low[:, 1::2] << 4).reshape(-1, 128)
    fifths = (q >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    parts: list[NDArray[np.uint8]] = [
        heads[0].view(np.uint8),
        heads[1].view(np.uint8),
        six,
        fifths,
        nibbles,
    ]
    return np.concatenate(parts[:3] + parts[3 if bits == 5 else 4 :], axis=1)


def _iq4_nl(x: Floats) -> NDArray[np.uint8]:
    head = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float16)
    return np.concatenate((head.view(np.uint8), _valued(x, head.astype(np.float32))), axis=1)


def _iq4_xs(x: Floats) -> NDArray[np.uint8]:
    scale = np.abs(x).max(-1) / 127
    head = (scale.max(-1, keepdims=True) / 31).astype(np.float16)
    d = head.astype(np.float32)
    sc = np.rint(_over(scale, d + 0 * scale)).clip(0, 31)
    codes = _valued(x, (d * sc)[..., None]).reshape(-1, 128)
    six = sc.astype(np.uint16) + 32
    low = (six[:, 0::2] & 15 | (six[:, 1::2] & 15) << 4).astype(np.uint8)
    high = (six >> 4 << np.arange(0, 16, 2, dtype=np.uint16)).sum(1, dtype=np.uint16)
    return np.concatenate((head.view(np.uint8), high[:, None].view(np.uint8), low, codes), axis=1)


def _valued(x: Floats, scale: Floats) -> NDArray[np.uint8]:
    """Return the nibbles of the nearest values, 32 numbers in 16 bytes."""
    at = _over(x, scale + 0 * x)
    codes = np.abs(at[..., None] - VALUES).argmin(-1).astype(np.uint8)
    packed: NDArray[np.uint8] = codes[..., :16] | np.left_shift(codes[..., 16:], 4, dtype=np.uint8)
    return packed


def _q6_k(x: Floats) -> NDArray[np.uint8]:
    most = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0] / -32
    head = (np.abs(most).max(-1, keepdims=True) / 127).astype(np.float16)
    d = head.astype(np.float32)
    sc = np.rint(_over(most, d + 0 * most)).clip(-128, 127)
    q = np.rint(_over(x, (d * sc)[..., None] + 0 * x)).clip(-32, 31) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = q >> 4
    pairs = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(
        -1, 64
    )
    return np.concatenate(
        (low, pairs, sc.astype(np.int8).view(np.uint8), head.view(np.uint8)), axis=1
    )


def turn(values: Floats, heads: int, *, back: bool = False) -> Floats:
    """Return rows whose rotation turns neighbours, from rows whose rotation turns halves; `back`: the reverse."""
    half = values.shape[0] // heads // 2
    pair = (heads, half, 2, -1) if back else (heads, 2, half, -1)
    return values.reshape(pair).swapaxes(1, 2).reshape(values.shape)


def settings(family: str, seed: int) -> dict[str, Any]:
    """Return a random configuration that GGUF can express, with whole blocks of 256 inputs."""
    chosen = random_models.settings(family, seed)
    draw = random.Random(seed)
    chosen |= {"hidden_size": 256, "intermediate_size": draw.choice((256, 512)), "mlp_bias": False}
    chosen |= {"num_attention_heads": 8, "num_key_value_heads": draw.choice((1, 2, 4, 8))}
    if family not in {"qwen2", "phi3", "olmo2", "granite", "smollm3"}:
        chosen["head_dim"] = draw.choice((32, 64))
    for name in ("use_sliding_window", "sliding_window", "max_window_layers"):
        if family.startswith("qwen"):
            chosen.pop(name, None)
    rope = chosen["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        chosen["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    if family.startswith("gemma"):
        chosen |= {"query_pre_attn_scalar": chosen["head_dim"], "attention_bias": False}
        chosen |= {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    if family == "gemma3_text":
        chosen |= {"sliding_window_pattern": 6, "num_hidden_layers": 7}
        if rope["full_attention"]["rope_type"] == "llama3":
            rope["full_attention"] = {"rope_type": "default", "rope_theta": 1e6}
    if family == "phi3":
        pairs = int(16 * rope["partial_rotary_factor"])
        rope["partial_rotary_factor"] = pairs / 16
        for kind in ("short_factor", "long_factor"):
            if kind in rope:
                rope[kind] = [draw.uniform(1, 4) for _ in range(pairs)]
    if family == "smollm3":
        chosen |= {"no_rope_layer_interval": 4, "num_hidden_layers": 5, "use_sliding_window": False}
        chosen.pop("no_rope_layers", None)
    return chosen


def write(
    directory: Path,
    target: Path,
    kind: Callable[[str], str],
    *,
    metadata: Callable[[GGUFWriter], None] = lambda writer: None,
    factors: Floats | None = None,
) -> Path:
    """Write a model's directory as a GGUF file: `kind(name)` is the type of each matrix, by Hugging Face's name.

    Without `metadata`, which adds a tokenizer, the vocabulary is w0, w1, …; `factors` divide the rotation's angles.
    """
    config = json.loads((directory / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 1e4)}
    rope = rope.get("full_attention", rope)
    architecture = ARCHITECTURES[config["model_type"]]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = GGUFWriter(str(target), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    _own(writer, config, rope)
    if rope.get("rope_type") in {"linear", "yarn"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    metadata(writer)
    if "tokenizer.ggml.tokens" not in writer.kv_data[0]:
        _words(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(_architecture(architecture), layers)
    for name, given in tensors(directory).items():
        turned = architecture in NEIGHBOURS and name.endswith(TURNED)
        values = turn(given, heads if ".q_proj." in name else kv_heads) if turned else given
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        if values.ndim == 1:
            writer.add_tensor(new, np.ascontiguousarray(values))
        else:
            packed = quantised(values, kind(name))
            writer.add_tensor(new, packed, raw_dtype=GGMLQuantizationType[kind(name)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _own(writer: GGUFWriter, config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Add what only some architectures have."""
    family = config["model_type"]
    if family in {"mistral", "gemma2", "gemma3_text", "phi3"} and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if family.startswith("gemma"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"] or 0.0)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"] or 0.0)
    if family == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if rope.get("rope_type") == "longrope":
        original, positions = (
            config["original_max_position_embeddings"],
            config["max_position_embeddings"],
        )
        writer.add_rope_scaling_orig_ctx_len(original)
        attention = math.sqrt(1 + math.log(positions / original) / math.log(original))
        writer.add_rope_scaling_attn_factors(attention)
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def tensors(directory: Path) -> dict[str, Floats]:
    """Return a directory's tensors in fp32, by name."""
    found: dict[str, Floats] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= {
            name: each.astype(np.float32)
            for name, each in safetensors.numpy.load_file(path).items()
        }
    return found


def dequantised(file: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights that the package reads from a file, fp32 under Hugging Face's names."""
    reader = GGUFReader(file)
    architecture = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(_architecture(architecture), config["num_hidden_layers"])
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    found = {}
    read = {tensor.name: tensor for tensor in reader.tensors}
    for name in _huggingface_names(config):
        tensor = read.get(names.get_name(name, try_suffixes=(".weight", ".bias")) or "")
        if tensor is None:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in tensor.shape[::-1]])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values - np.float32(1)
        if architecture in NEIGHBOURS and name.endswith(TURNED):
            heads = config["num_attention_heads"] if ".q_proj." in name else kv_heads
            values = turn(values, heads, back=True)
        found[name] = torch.from_numpy(values.copy())
    return found


def _huggingface_names(config: Mapping[str, Any]) -> list[str]:
    parts = [f"self_attn.{each}_{kind}" for each in "qkvo" for kind in ("proj", "norm")]
    parts += ["self_attn.qkv_proj"]
    parts += [f"mlp.{each}_proj" for each in ("gate", "up", "down", "gate_up")]
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    parts += [f"{each}_layernorm" for each in norms]
    layers = [
        f"model.layers.{n}.{part}" for n in range(config["num_hidden_layers"]) for part in parts
    ]
    whole = ["model.embed_tokens", "model.norm", "lm_head"]
    return [f"{name}.{kind}" for name in (*whole, *layers) for kind in ("weight", "bias")]


def _architecture(name: str) -> Any:
    return next(arch for arch, found in gguf.MODEL_ARCH_NAMES.items() if found == name)


def _words(writer: GGUFWriter, count: int) -> None:
    words = [f"w{n}" for n in range(count)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def byte_level(writer: GGUFWriter, tokenizer: Mapping[str, Any], pre: str) -> None:
    """Add a byte-level tokenizer, given as the content of its tokenizer.json."""
    vocabulary = dict(tokenizer["model"]["vocab"])
    added = {each["content"]: each for each in tokenizer["added_tokens"]}
    vocabulary |= {text: each["id"] for text, each in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            kinds.NORMAL if token not in added
            else kinds.CONTROL if added[token]["special"] else kinds.USER_DEFINED
            for token in tokens
        ]
    )  # fmt: skip
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])


def demo(target: Path, kind: Callable[[str], str]) -> Path:
    """Write the shipped chat model as a GGUF file, with its tokenizer and templates."""
    directory = Path(__file__).resolve().parents[2] / "models" / "demo"

    def metadata(writer: GGUFWriter) -> None:
        byte_level(writer, json.loads((directory / "tokenizer.json").read_text()), "smollm")
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(
            [
                {"name": "default", "template": (directory / "chat_template.jinja").read_text()},
                {"name": "grounding", "template": (directory / "grounding.jinja").read_text()},
            ]
        )
        writer.add_sampling_temp(0.0)

    return write(directory, target, kind, metadata=metadata)
