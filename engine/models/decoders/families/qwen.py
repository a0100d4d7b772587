"""Qwen 2, 2.5 and 3: windows in some layers, if use_sliding_window is set."""

from __future__ import annotations

import dataclasses

from engine.models.decoders.families.plain import plain_decoder
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.spec import DecoderSpec

_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def parse_qwen2(fields: ConfigFields) -> DecoderSpec:
    """Build the spec of a Qwen 2; ConfigError names the field that cannot be served."""
    # the biases of Qwen 2 are fixed in transformers' code, not in its configuration
    return dataclasses.replace(_windowed(fields.over(_DEFAULTS)), qkv_bias=True)


def parse_qwen3(fields: ConfigFields) -> DecoderSpec:
    """Build the spec of a Qwen 3; ConfigError names the field that cannot be served."""
    bias = fields.flag("attention_bias")
    spec = _windowed(fields.over({**_DEFAULTS, "head_dim": 128}))
    return dataclasses.replace(spec, qkv_bias=bias, out_bias=bias, qk_norm="head")


def _windowed(fields: ConfigFields) -> DecoderSpec:
    spec = plain_decoder(fields)
    window = fields.window() if fields.flag("use_sliding_window") else None
    first = spec.layers if window is None else fields.count("max_window_layers", least=0)
    kinds = ["full_attention" if n < first else "sliding_attention" for n in range(spec.layers)]
    kinds = list(fields.layer_kinds(spec.layers, kinds))
    return dataclasses.replace(spec, windows=fields.windows(kinds, window))
