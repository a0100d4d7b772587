"""Conversations of token ids with the published statistics of ShareGPT, to scale: what P1's systems are asked."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.chat.scripts import Lengths

# Of ShareGPT: the logarithm of a conversation's turns, and the mean tokens of a turn and of its answer (Pensieve, 6).
TURNS_MU, TURNS_SIGMA = 0.981, 1.131
PROMPT_TOKENS, ANSWER_TOKENS = 37.77, 204.58
ORDINARY = 10  # the first ids are a model's special tokens


@dataclass(frozen=True, slots=True)
class Scale:
    """What the statistics are divided by: lengths in tokens, pauses in seconds; `context` bounds a conversation.

    Only conversations of `least_turns` are taken, before the context cuts any short.
    """

    lengths: float
    pauses: float
    context: int
    think_s: float = 60.0
    least_turns: int = 1


class Turn(NamedTuple):
    """One turn: wait `think_s` after the last answer, say `tokens`, want `wanted` tokens of answer."""

    think_s: float
    tokens: list[int]
    wanted: int


def conversations(scale: Scale, vocabulary: int, seed: int) -> Iterator[list[Turn]]:
    """Yield conversations for ever, none longer than the context; the same for the same seed."""
    prompt = Lengths(PROMPT_TOKENS / scale.lengths, limit=scale.context // 4)
    answer = Lengths(ANSWER_TOKENS / scale.lengths, limit=scale.context // 4)
    for number in itertools.count():
        rng = random.Random(f"{seed}-{number}")
        turns: list[Turn] = []
        length = 0
        count = math.ceil(rng.lognormvariate(TURNS_MU, TURNS_SIGMA))
        if count < scale.least_turns:
            continue
        for turn in range(count):
            asked, wanted = prompt.draw(rng), answer.draw(rng)
            length += asked + wanted
            if length > scale.context:
                break
            think_s = rng.expovariate(scale.pauses / scale.think_s) if turn else 0.0
            turns.append(Turn(think_s, rng.choices(range(ORDINARY, vocabulary), k=asked), wanted))
        yield turns
