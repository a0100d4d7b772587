"""Mistral: one window for all layers, and never a bias."""

from __future__ import annotations

import dataclasses

from engine.models.decoders.families.plain import plain_decoder
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.spec import DecoderSpec

_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def parse(fields: ConfigFields) -> DecoderSpec:
    """Build the spec; ConfigError names the field that cannot be served."""
    fields = fields.over(_DEFAULTS)
    spec = plain_decoder(fields)
    return dataclasses.replace(spec, windows=(fields.window(),) * spec.layers)
