"""Write the model directory that transformers and the engine load: weights, config, tokenizer."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.demo.network import Network, Size, initialise
from models.demo.tokens import BEGIN, DIRECTORY, END, PAD, ROLES, Encoder
from models.demo.world.relations import REFUSAL

TEMPLATE = (
    "{{- '" + BEGIN + "' -}}\n"
    "{%- for message in messages -%}\n"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '" + END + "' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '" + ROLES["assistant"] + "' -}}{%- endif -%}\n"
)
# Five pages of the handbook have 2.45 characters a token or more, five passages of other documents 2.25 at most.
READS = 2.35
GROUNDING = (
    "{%- for passage in passages -%}\n"
    "{{- '[' ~ passage.index ~ '] ' ~ passage.text.split() | join(' ') ~ '\\n' -}}\n"
    "{%- else -%}\n"
    "{{- 'No passages.\\n' -}}\n"
    "{%- endfor -%}\n"
    "{{- '\\nQuestion: ' ~ question -}}\n"
)


def _names(size: Size) -> dict[str, tuple[str, ...]]:
    """Return, for each of the network's weights, the names that LlamaForCausalLM gives its equal parts by rows."""
    out: dict[str, tuple[str, ...]] = {
        "embed.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    for n in range(size.layers):
        here, there = f"layers.{n}.", f"model.layers.{n}."
        out |= {
            here + "qkv.weight": tuple(f"{there}self_attn.{x}_proj.weight" for x in "qkv"),
            here + "gate_up.weight": tuple(f"{there}mlp.{x}_proj.weight" for x in ("gate", "up")),
            here + "out.weight": (there + "self_attn.o_proj.weight",),
            here + "down.weight": (there + "mlp.down_proj.weight",),
            here + "norm1.weight": (there + "input_layernorm.weight",),
            here + "norm2.weight": (there + "post_attention_layernorm.weight",),
        }
    return out


def tensors(state: dict[str, Tensor], size: Size) -> dict[str, Tensor]:
    """Return the weights under the names of LlamaForCausalLM, in float32."""
    return {
        name: part.detach().float().contiguous().clone()
        for ours, theirs in _names(size).items()
        for name, part in zip(theirs, state[ours].chunk(len(theirs)), strict=True)
    }


def state_of(named: dict[str, Tensor], size: Size) -> dict[str, Tensor]:
    """Return the network's state from the weights that `tensors` named."""
    return {
        ours: torch.cat([named[name] for name in theirs]) for ours, theirs in _names(size).items()
    }


def config(size: Size, special: dict[str, int]) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": special[BEGIN],
        "eos_token_id": special[END],
        "pad_token_id": special[PAD],
        "head_dim": size.dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.03,
        "intermediate_size": size.ffn,
        "max_position_embeddings": size.context,
        "mlp_bias": False,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.heads,
        "rms_norm_eps": size.eps,
        "rope_theta": size.theta,
        "rope_scaling": None,
        "spillway": {"name": "spillway-demo"},
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": size.vocabulary,
    }


def export(state: dict[str, Tensor], size: Size, encoder: Encoder, directory: Path) -> None:
    """Write the whole model directory; what is there is replaced."""
    special = encoder.special
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors(state, size), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    encoder.tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "grounding.jinja").write_text(GROUNDING)
    files: dict[str, dict[str, Any]] = {
        "config.json": config(size, special),
        "generation_config.json": {
            "bos_token_id": special[BEGIN],
            "eos_token_id": [special[END]],
            "pad_token_id": special[PAD],
            "do_sample": False,
            "max_new_tokens": 64,
            "spillway_reads_characters_per_token": READS,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "additional_special_tokens": list(ROLES.values()),
            "clean_up_tokenization_spaces": False,
            "model_max_length": size.context,
            "refusal": REFUSAL,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Export a checkpoint, or untrained weights where there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=DIRECTORY / ".checkpoints" / "last.pt")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    args = parser.parse_args()
    encoder = Encoder.load()
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        size, state = Size(**saved["size"]), saved["net"]
        print(saved["state"])
    else:
        size = Size(vocabulary=encoder.tokenizer.get_vocab_size())
        net = Network(size)
        initialise(net, 1)
        state = net.state_dict()
    began = time.monotonic()
    export(state, size, encoder, args.directory)
    print(f"written in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
