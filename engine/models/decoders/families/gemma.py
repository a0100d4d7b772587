"""Gemma 2, and the text part of Gemma 3: norms around attention and MLP, local and global layers.

The stored weights of norms are offsets from 1. Token embeddings are scaled by the square root of their size.
"""

from __future__ import annotations

import dataclasses

from common.errors import ConfigError
from engine.models.decoders.families.plain import plain_decoder
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.rope import RopeSpec, read_rope
from engine.models.decoders.spec import DecoderSpec

_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS2 = {
    **_DEFAULTS,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_DEFAULTS3 = {
    **_DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def parse_gemma2(fields: ConfigFields) -> DecoderSpec:
    """Build the spec of a Gemma 2; ConfigError names the field that cannot be served."""
    fields = fields.over(_DEFAULTS2)
    spec = _gemma(fields, every=2, rope=None)
    return dataclasses.replace(spec, score_cap=fields.cap("attn_logit_softcapping"))


def parse_gemma3(fields: ConfigFields) -> DecoderSpec:
    """Build the spec of a Gemma 3 for text; ConfigError names the field that cannot be served."""
    fields = fields.over(_DEFAULTS3)
    local, everywhere = _rotation(fields, "sliding_attention"), _rotation(fields, "full_attention")
    # Gemma 3 caps no attention scores, even if the file has a cap
    spec = _gemma(fields, every=fields.count("sliding_window_pattern"), rope=everywhere)
    ropes = tuple(everywhere if window is None else local for window in spec.windows)
    if len({rope.short_context for rope in ropes if rope.short_context}) > 1:
        raise ConfigError(
            f"{fields.where}: rope_parameters change at {local.original} tokens in some layers and at "
            f"{everywhere.original} in others; expected one original_max_position_embeddings"
        )
    return dataclasses.replace(spec, ropes=ropes, qk_norm="head")


def parse_gemma3_with_images(fields: ConfigFields) -> DecoderSpec:
    """Build the spec of the text part of a Gemma 3 with images; ConfigError names the field that cannot be served.

    Images are not served.
    """
    text = fields.config.get("text_config")
    if not isinstance(text, dict):
        raise fields.wrong("text_config", "an object")
    # the head belongs to the whole model, whose own field ties it to the token embeddings, and which caps no logits
    tied = fields.over({"tie_word_embeddings": True}).flag("tie_word_embeddings")
    within = {**text, "model_type": "gemma3", "tie_word_embeddings": tied}
    spec = parse_gemma3(ConfigFields(within, f"{fields.where}: text_config"))
    return dataclasses.replace(spec, logit_cap=0.0)


def _gemma(fields: ConfigFields, *, every: int, rope: RopeSpec | None) -> DecoderSpec:
    """Return the spec as far as Gemma 2 and 3 agree; by default one layer in `every` is global."""
    if fields.config.get("use_bidirectional_attention") not in (None, False):
        raise fields.wrong("use_bidirectional_attention", "false")
    spec = plain_decoder(fields, rope=rope, activation="hidden_activation")
    kinds = [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(spec.layers)
    ]
    kinds = list(fields.layer_kinds(spec.layers, kinds))
    bias = fields.flag("attention_bias")
    return dataclasses.replace(
        spec,
        windows=fields.windows(kinds, fields.window()),
        qkv_bias=bias,
        out_bias=bias,
        norms="around",
        norm_offset=1.0,
        embed_scale=spec.hidden**0.5,
        embed_scale_rounded=True,
        score_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logit_cap=fields.cap("final_logit_softcapping"),
    )


def _rotation(fields: ConfigFields, kind: str) -> RopeSpec:
    """Return the rotation of local or of global layers; `rope_scaling` applies to global layers."""
    config, head_dim = fields.config, fields.count("head_dim")
    given, older = config.get("rope_parameters"), config.get("rope_scaling")
    if not isinstance(given, dict | None):
        raise fields.wrong("rope_parameters", "an object for each kind of layer")
    parameters = (given or {}).get(kind)
    parameters = {"rope_type": "default"} if parameters is None else parameters
    whole = kind == "full_attention"
    if whole and older is not None:
        parameters = {**parameters, **older} if isinstance(older, dict) else None
    if not isinstance(parameters, dict):
        raise fields.wrong("rope_scaling" if older else "rope_parameters", "an object")
    return read_rope(
        parameters,
        head_dim=head_dim,
        positions=fields.count("max_position_embeddings"),
        where=f"{fields.where}: the rotation of {kind}",
        theta=config.get("rope_theta" if whole else "rope_local_base_freq"),
    )
