"""What transformers predicts of a text whose passages are computed alone, and texts with passages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from bench.engine import random_models

Span = tuple[int, int]


def passage(seed: int, count: int) -> list[int]:
    """Return the tokens of a passage."""
    draw = random.Random(seed)
    return [draw.randrange(3, random_models.VOCABULARY) for _ in range(count)]


def prompt_of(
    passages: Sequence[Sequence[int]], *, seed: int = 7, before: int = 40, after: int = 9
) -> tuple[list[int], list[Span]]:
    """Return a prompt with passages, three tokens between two of them, and the passages' spans."""
    tokens, spans = [1, *passage(seed, before - 1)], []
    for number, each in enumerate(passages):
        tokens += passage(100 + number, 3)
        spans.append((len(tokens), len(tokens) + len(each)))
        tokens += each
    return [*tokens, *passage(seed + 1, after)], spans


def oracle(model: Any, tokens: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
    """Return transformers' logits (rows, vocabulary) of all tokens outside of spans, the passages computed alone."""
    import transformers

    kept, rows, at = transformers.DynamicCache(config=model.config), [], 0
    with torch.inference_mode():
        for begin, end in [*spans, (len(tokens), len(tokens))]:
            if at < begin:
                place = torch.arange(at, begin)
                ids = torch.tensor([list(tokens[at:begin])])
                more: dict[str, Any] = {"position_ids": place[None], "cache_position": place}
                rows.append(model(ids, past_key_values=kept, use_cache=True, **more).logits[0])
            if begin < end:
                alone = transformers.DynamicCache(config=model.config)
                ids = torch.tensor([[tokens[0], *tokens[begin:end]]])
                model(ids, past_key_values=alone, use_cache=True)
                layers: list[Any] = list(alone.layers)
                for layer, found in enumerate(layers):
                    keys = _turned(found.keys[:, :, 1:], model.model.rotary_emb.inv_freq, begin - 1)
                    kept.update(keys, found.values[:, :, 1:], layer)
            at = end
    return torch.cat(rows).float()


def _turned(keys: torch.Tensor, frequencies: torch.Tensor, by: int) -> torch.Tensor:
    """Return rotated keys (…, dim) turned on by a number of positions, as complex numbers."""
    half = len(frequencies)
    numbers = torch.complex(keys[..., :half].double(), keys[..., half : 2 * half].double())
    numbers = numbers * torch.exp(1j * by * frequencies.double())
    turned = torch.cat((numbers.real, numbers.imag), -1).to(keys.dtype)
    return torch.cat((turned, keys[..., 2 * half :]), -1)
