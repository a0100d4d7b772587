"""Granite 3: Llama with multipliers of token embeddings, attention scores, residuals and logits."""

from __future__ import annotations

import dataclasses

from engine.models.decoders.families import llama
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.spec import DecoderSpec


def parse(fields: ConfigFields) -> DecoderSpec:
    """Build the spec; ConfigError names the field that cannot be served."""
    return dataclasses.replace(
        llama.parse(fields),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        score_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )
