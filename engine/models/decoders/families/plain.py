"""The plain decoder, of which all families are variants: Llama's, with no bias, window or scale."""

from __future__ import annotations

from common.errors import ConfigError
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.rope import RopeSpec, parse_rope
from engine.models.decoders.spec import DecoderSpec

# No model comes near these sizes; a larger number is a mistake, which must be found before memory is allocated.
_LAYERS, _HEADS, _WIDTH, _VOCABULARY = 4096, 1 << 14, 1 << 20, 1 << 24


def plain_decoder(
    fields: ConfigFields, *, rope: RopeSpec | None = None, activation: str = "hidden_act"
) -> DecoderSpec:
    """Return the plain decoder with a configuration's sizes; `activation` is the name of the activation's field.

    All layers have the rotation `rope`, by default the configuration's. ConfigError names an unsupported field.
    """
    layers = fields.count("num_hidden_layers", most=_LAYERS)
    hidden = fields.count("hidden_size", most=_WIDTH)
    heads = fields.count("num_attention_heads", most=_HEADS)
    kv_heads = fields.count("num_key_value_heads", heads, most=_HEADS)
    head_dim = fields.count("head_dim", hidden // heads, most=_WIDTH)
    if heads % kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"{fields.where}: head_dim is {head_dim}; expected an even number")
    positions = fields.count("max_position_embeddings")
    if rope is None:
        rope = parse_rope(fields.config, head_dim=head_dim, positions=positions, where=fields.where)
    return DecoderSpec(
        family=str(fields.config["model_type"]),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.count("intermediate_size", most=_WIDTH),
        vocabulary=fields.count("vocab_size", most=_VOCABULARY),
        positions=positions,
        epsilon=fields.epsilon(),
        activation=fields.activation(activation),
        ropes=(rope,) * layers,
        windows=(None,) * layers,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tied=fields.flag("tie_word_embeddings"),
    )
