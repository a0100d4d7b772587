"""Phi 3, 3.5 and 4: joined projections, a part of each head rotated, LongRoPE."""

from __future__ import annotations

import dataclasses

from common.errors import ConfigError
from engine.models.decoders.families.plain import plain_decoder
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.rope import read_rope, rope_parameters
from engine.models.decoders.spec import DecoderSpec

_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
_OLDER = ("su", "yarn")  # names of LongRoPE in older files


def parse(fields: ConfigFields) -> DecoderSpec:
    """Build the spec; ConfigError names the field that cannot be served."""
    fields = fields.over(_DEFAULTS)
    config = fields.config
    given, name = rope_parameters(config, fields.where)
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise ConfigError(f"{fields.where}: partial_rotary_factor is {share!r}; expected 0 to 1")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "longrope", *_OLDER):
        raise ConfigError(
            f"{fields.where}: {name} has rope_type {kind!r}; expected default or longrope"
        )
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", hidden // heads)
    if head_dim * share < 1:
        raise ConfigError(
            f"{fields.where}: partial_rotary_factor is {share!r}, which rotates nothing of {head_dim} numbers"
        )
    rope = read_rope(
        {**given, "rope_type": "longrope" if kind in _OLDER else kind},
        head_dim=head_dim,
        positions=fields.count("max_position_embeddings"),
        where=f"{fields.where}: {name}",
        theta=config.get("rope_theta", 10_000.0),
        original=config["original_max_position_embeddings"],
        share=float(share),
    )
    spec = plain_decoder(fields, rope=rope)
    return dataclasses.replace(spec, windows=(fields.window(),) * spec.layers)
