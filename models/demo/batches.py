"""Training batches: conversations of the curriculum, packed by length, a function of (seed, step)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from models.demo.tokens import PAD, Encoder
from models.demo.world.conversations import Shape, conversation

# (millions of tokens seen when it begins, ((weight, shape), ...))
CURRICULUM: Final[tuple[tuple[float, tuple[tuple[float, Shape], ...]], ...]] = (
    (0.0, ((1, Shape((2, 3), (1, 1), (6, 8), refuse=0.05, follow=0.0, one_kind=0.8)),)),
    (
        1.2,
        (
            (1, Shape((2, 3), (1, 2), (6, 8), refuse=0.1, follow=0.1, one_kind=0.8)),
            (2, Shape((4, 5), (1, 1), (7, 8), refuse=0.1, follow=0.1, one_kind=0.8)),
        ),
    ),
    (
        3.0,
        (
            (2, Shape((4, 5), (1, 2), (8, 10), refuse=0.2, follow=0.15, one_kind=0.7)),
            (1, Shape((3, 5), (2, 3), (8, 10), page=0.3, refuse=0.2, small_talk=0.05)),
        ),
    ),
    (
        6.0,
        (
            (2, Shape((4, 5), (1, 2), (8, 10), refuse=0.25, small_talk=0.1)),
            (4, Shape((5, 5), (2, 4), (10, 14), page=0.7, refuse=0.25, small_talk=0.1)),
            (1, Shape((1, 5), (1, 3), (3, 6), page=0.5, small_talk=0.2, regroup=0.4)),
            (0.5, Shape((5, 5), (2, 4), (3, 4), page=0.8, regroup=0.9, follow=0.4)),
        ),
    ),
    (
        16.0,
        (
            (1, Shape((4, 5), (1, 2), (8, 10), refuse=0.25, small_talk=0.1)),
            (6, Shape((5, 5), (2, 4), (10, 14), page=0.75, refuse=0.25, small_talk=0.05)),
            (1, Shape((1, 5), (1, 4), (3, 6), page=0.6, small_talk=0.2, regroup=0.4)),
            (1, Shape((5, 5), (2, 4), (3, 4), page=0.8, regroup=0.9, follow=0.4)),
            (0.5, Shape((8, 20), (1, 3), (10, 14), page=0.5, refuse=0.2)),
            (0.2, Shape((20, 60), (1, 1), (16, 20), refuse=0.2)),
        ),
    ),
    (
        25.5,
        (
            (1, Shape((4, 5), (1, 2), (8, 10), refuse=0.45, small_talk=0.1)),
            (6, Shape((5, 5), (1, 4), (8, 12), page=0.7, refuse=0.45, one_kind=0.9)),
            (0.5, Shape((1, 5), (1, 4), (3, 6), page=0.6, small_talk=0.2, regroup=0.4)),
            (1, Shape((5, 5), (2, 4), (3, 4), page=0.8, regroup=0.9, follow=0.4)),
            (0.3, Shape((8, 20), (1, 3), (10, 14), page=0.5, refuse=0.3)),
        ),
    ),
    (
        27.0,
        (
            (0.7, Shape((4, 5), (1, 2), (8, 10), refuse=0.35, small_talk=0.1)),
            (2.5, Shape((5, 5), (1, 4), (10, 14), page=0.7, refuse=0.35, small_talk=0.05)),
            (5, Shape((5, 5), (1, 2), (6, 9), page=0.6, refuse=0.35, one_kind=1.0, shared=0.8)),
            (0.7, Shape((1, 5), (1, 4), (3, 6), page=0.6, small_talk=0.2, regroup=0.4)),
            (1.2, Shape((5, 5), (1, 4), (3, 4), page=0.8, refuse=0.3, regroup=0.9, follow=0.4)),
            (0.8, Shape((8, 20), (1, 3), (10, 14), page=0.5, refuse=0.25, shared=0.3)),
        ),
    ),
)
BATCH_TOKENS: Final = 4096
POOL: Final = 192
STEP_OF_LENGTH: Final = 32


@dataclass(slots=True)
class Batch:
    """Padded ids and positions [batch, tokens]; flat rows with a target, its id and its weight."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    weights: Tensor
    tokens: int


def shape_at(rng: random.Random, millions: float) -> Shape:
    """Return a shape of the curriculum after `millions` of tokens."""
    stage = [mix for begin, mix in CURRICULUM if begin <= millions][-1]
    return rng.choices([s for _, s in stage], [w for w, _ in stage])[0]


def gaps(rng: random.Random, ids: list[int], breaks: set[int], context: int) -> list[int]:
    """Return rising positions below `context`; in most conversations they jump at line breaks.

    So the model meets the distances of long prompts without their cost.
    """
    spare = context - len(ids)
    at = [i for i, token in enumerate(ids) if token in breaks]
    jumps = [0] * len(ids)
    if spare > 0 and at and rng.random() < 0.6:
        total = int(spare * rng.random() ** 2)
        for _ in range(len(at)):
            jumps[rng.choice(at)] += total // len(at)
    out, now = [], 0
    for jump in jumps:
        now += jump
        out.append(now)
        now += 1
    return out


def collate(
    examples: list[tuple[list[int], list[bool], list[int]]], pad: int, other: float
) -> Batch:
    """Return one batch; tokens that the model does not say weigh `other` (0: left out)."""
    longest = max(len(ids) for ids, _, _ in examples)
    tokens = -(-longest // STEP_OF_LENGTH) * STEP_OF_LENGTH
    ids = torch.full((len(examples), tokens), pad)
    positions = torch.zeros((len(examples), tokens), dtype=torch.long)
    rows: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    for b, (seq, said, where) in enumerate(examples):
        ids[b, : len(seq)] = torch.tensor(seq)
        positions[b, : len(seq)] = torch.tensor(where)
        for i in range(1, len(seq)):
            if said[i] or other:
                rows.append(b * tokens + i - 1)
                targets.append(seq[i])
                weights.append(1.0 if said[i] else other)
    count = sum(len(seq) for seq, _, _ in examples)
    return Batch(
        ids, positions, torch.tensor(rows), torch.tensor(targets), torch.tensor(weights), count
    )


def batches(
    encoder: Encoder, seed: int, pool: int, millions: float, other: float
) -> Iterator[Batch]:
    """Yield the batches of pool number `pool`: all of one stage, in random order."""
    rng = random.Random(f"training {seed} {pool}")
    pad = encoder.special[PAD]
    breaks = {encoder.special["<|user|>"], *encoder.text("\n")}
    made = []
    for _ in range(POOL):
        ids, said = encoder.conversation(conversation(rng, shape_at(rng, millions)))
        if len(ids) <= 2048:
            made.append((ids, said, gaps(rng, ids, breaks, 4096)))
    made.sort(key=lambda e: len(e[0]))
    groups: list[list[tuple[list[int], list[bool], list[int]]]] = [[]]
    for example in made:
        if groups[-1] and (len(groups[-1]) + 1) * len(example[0]) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        yield collate(group, pad, other)
