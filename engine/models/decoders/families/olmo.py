"""OLMo 2: norms after attention and MLP, and norms of queries and keys over all heads together."""

from __future__ import annotations

import dataclasses

from engine.models.decoders.families.plain import plain_decoder
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.spec import DecoderSpec


def parse(fields: ConfigFields) -> DecoderSpec:
    """Build the spec; ConfigError names the field that cannot be served."""
    fields = fields.over({"rms_norm_eps": 1e-5})
    bias = fields.flag("attention_bias")
    return dataclasses.replace(
        plain_decoder(fields), qkv_bias=bias, out_bias=bias, qk_norm="whole", norms="after"
    )
