"""Conversations of token ids with the published statistics of ShareGPT, to scale: what P1's systems are asked."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.arrivals import poisson
from loadgen.chat.scripts import Lengths

# Of ShareGPT: the logarithm of a conversation's turns, and the mean tokens of a turn and of its answer (Pensieve, 6).
TURNS_MU, TURNS_SIGMA = 0.981, 1.131
PROMPT_TOKENS, ANSWER_TOKENS = 37.77, 204.58
ORDINARY = 10  # the first ids are a model's special tokens
BEFORE_S = 300.0  # so long ago the first of those began that are under way
PAST_ANSWER_S = 0.5  # what an answer took them


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


class Begun(NamedTuple):
    """A conversation under way: `turns` go on after `past` turns that make `history`, the first after its pause."""

    history: list[int]
    past: int
    turns: list[Turn]


def under_way(scale: Scale, vocabulary: int, seed: int, rate: float, words: int = 0) -> list[Begun]:
    """Return those that are open at moment 0 if they have begun at this rate for long; other ones for other seeds.

    Of their answers only the number of tokens is what it would have been. Other `words` are said at other rates, by
    the same conversations.
    """
    found = []
    some = conversations(scale, vocabulary, -1 - seed, words)
    rng, answered = random.Random(f"{seed}-past"), random.Random(f"{seed}-{words}-answered")
    for after_s in itertools.takewhile(lambda at: at < BEFORE_S, poisson(rate, rng)):
        at_s, history = after_s - BEFORE_S, list[int]()
        turns = next(some)
        for past, turn in enumerate(turns):
            at_s += turn.think_s
            if at_s >= 0:
                found.append(
                    Begun(history, past, [turn._replace(think_s=at_s), *turns[past + 1 :]])
                )
                break
            answer = answered.choices(range(ORDINARY, vocabulary), k=turn.wanted)
            history += [*turn.tokens, *answer]
            at_s += PAST_ANSWER_S
    return found


def conversations(scale: Scale, vocabulary: int, seed: int, words: int = 0) -> Iterator[list[Turn]]:
    """Yield conversations for ever, none longer than the context.

    The same seed gives the same lengths and pauses, and with the same `words` the same tokens.
    """
    prompt = Lengths(PROMPT_TOKENS / scale.lengths, limit=scale.context // 4)
    answer = Lengths(ANSWER_TOKENS / scale.lengths, limit=scale.context // 4)
    for number in itertools.count():
        rng, said = random.Random(f"{seed}-{number}"), random.Random(f"{seed}-{number}-{words}")
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
            tokens = said.choices(range(ORDINARY, vocabulary), k=asked)
            turns.append(Turn(think_s, tokens, wanted))
        yield turns
