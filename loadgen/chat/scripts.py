"""Conversations of synthetic text, with lengths, turns and pauses drawn from a seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen import bodies


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal length with this mean and this sigma of its logarithm, at least 1 and at most `limit`."""

    mean: float
    sigma: float = 1.0
    limit: int = 4096

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.limit, round(rng.lognormvariate(mu, self.sigma))))


@dataclass(frozen=True, slots=True)
class ScriptShape:
    """The shape of conversations. By default the means are ShareGPT's: 38 in, 205 out, 5.56 turns a conversation.

    `prompt` counts words, each of one token or more, and `output` tokens; `turns` is the mean of a geometric
    distribution, and `think_s` the mean of an exponential pause before each later turn, in seconds.
    """

    prompt: Lengths = Lengths(38.0)
    output: Lengths = Lengths(205.0)
    turns: float = 5.56
    think_s: float = 60.0
    max_turns: int = 64


@dataclass(frozen=True, slots=True)
class Say:
    """One turn: wait `think_s`, say `text`, and ask for an answer of up to `max_tokens`."""

    text: str
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation; the seeds of its requests derive from `number`."""

    number: int
    says: tuple[Say, ...]


def scripts(shape: ScriptShape, seed: int) -> Iterator[Script]:
    """Yield endless conversations, the same for the same seed."""
    for number in itertools.count():
        rng = random.Random(f"{seed}-{number}")
        says = []
        for turn in range(_turns(shape, rng)):
            think_s = rng.expovariate(1.0 / shape.think_s) if turn and shape.think_s > 0 else 0.0
            words = " ".join(rng.choices(bodies.WORDS, k=shape.prompt.draw(rng)))
            says.append(Say(words, shape.output.draw(rng), think_s))
        yield Script(number, tuple(says))


def _turns(shape: ScriptShape, rng: random.Random) -> int:
    if shape.turns <= 1:
        return 1
    drawn = math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / shape.turns)
    return max(1, min(shape.max_turns, math.ceil(drawn)))
