"""The families of generators that can be served, by `model_type`, with the function that parses each configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError
from engine.models.decoders.families import gemma, granite, llama, mistral, olmo, phi, qwen, smollm
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.spec import DecoderSpec

# By `model_type`.
FAMILIES = {
    "llama": llama.parse,
    "qwen2": qwen.parse_qwen2,
    "qwen3": qwen.parse_qwen3,
    "mistral": mistral.parse,
    "gemma2": gemma.parse_gemma2,
    "gemma3_text": gemma.parse_gemma3,
    "gemma3": gemma.parse_gemma3_with_images,
    "phi3": phi.parse,
    "olmo2": olmo.parse,
    "granite": granite.parse,
    "smollm3": smollm.parse,
}


def parse_decoder(config: Mapping[str, Any], *, where: str) -> DecoderSpec:
    """Build the spec from a `config.json`; ConfigError names the field that cannot be served.

    Fields that a file leaves out have transformers' defaults.
    """
    kind = config.get("model_type")
    parse = FAMILIES.get(kind) if isinstance(kind, str) else None
    if parse is None:
        raise ConfigError(
            f"{where}: model_type is {kind!r}; supported for generation are {', '.join(FAMILIES)}"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{where}: quantization_config is set; expected weights in fp32, bf16 or fp16"
        )
    fields = ConfigFields(config, where)
    spec = parse(fields)
    kinds = fields.layer_kinds(spec.layers, ())
    if any(kind == "sliding_attention" and spec.windows[n] is None for n, kind in enumerate(kinds)):
        raise ConfigError(
            f"{where}: layer_types has sliding_attention, which {kind} has not; expected full_attention"
        )
    return spec
