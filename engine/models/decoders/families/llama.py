"""Llama 1 to 3."""

from __future__ import annotations

import dataclasses

from engine.models.decoders.families.plain import plain_decoder
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.spec import DecoderSpec


def parse(fields: ConfigFields) -> DecoderSpec:
    """Build the spec; ConfigError names the field that cannot be served."""
    bias = fields.flag("attention_bias")
    return dataclasses.replace(
        plain_decoder(fields), qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias")
    )
