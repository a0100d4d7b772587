"""SmolLM 3: Llama with some layers without rotation, which may have a window."""

from __future__ import annotations

import dataclasses

from common.errors import ConfigError
from engine.models.decoders.families import llama
from engine.models.decoders.fields import ConfigFields
from engine.models.decoders.spec import DecoderSpec

_DEFAULTS = {
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def parse(fields: ConfigFields) -> DecoderSpec:
    """Build the spec; ConfigError names the field that cannot be served."""
    fields = fields.over(_DEFAULTS)
    spec = llama.parse(fields)
    rotated = _rotated(fields, spec.layers)
    window = fields.window() if fields.flag("use_sliding_window") else None
    kinds = [
        "full_attention" if turns or window is None else "sliding_attention" for turns in rotated
    ]
    # transformers masks layers listed as sliding_attention even where use_sliding_window is false
    kinds = list(fields.layer_kinds(spec.layers, kinds))
    return dataclasses.replace(
        spec,
        ropes=tuple(
            rope if turns else None for rope, turns in zip(spec.ropes, rotated, strict=True)
        ),
        windows=fields.windows(kinds, fields.window()),
    )


def _rotated(fields: ConfigFields, layers: int) -> list[bool]:
    """Return which layers are rotated: those with a 1 in `no_rope_layers`, contrary to the field's name."""
    given = fields.config.get("no_rope_layers")
    if given is None:
        every = fields.count("no_rope_layer_interval")
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers or not all(n in (0, 1) for n in given):
        raise ConfigError(f"{fields.where}: no_rope_layers must be a list of {layers}, each 0 or 1")
    return [bool(turns) for turns in given[:layers]]
