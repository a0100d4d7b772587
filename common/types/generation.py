"""Types of a generation that both the wire and the engine use."""

from __future__ import annotations

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters by which tokens are drawn.

    `temperature` 0 is greedy, `top_k` 0 and `min_p` 0 are off; `seed` is fixed at admission.
    `presence` and `frequency` count generated tokens, `repetition` prompt and generated ones; `bias` adds to logits.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    bias: dict[int, float] = {}


class OutputGrammar(msgspec.Struct, frozen=True):
    """The grammar that a generated text must match from its first to its last character.

    `source` is a JSON Schema, a regular expression (Rust's notation), or a grammar in Lark's notation.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str


class Logprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token's id, its bytes (`raw`) and log probability, and the likeliest alternatives where asked."""

    id: int
    raw: bytes
    logprob: float
    top: list[Logprob] = []


FinishReason = Literal["stop", "length"]
