"""Held-out chronicles, and how well the model says what only its database knows."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from tokenizers import Tokenizer

from engine.models.retro.database import ChunkDatabase, Embed, Neighbour, Vectors, values
from engine.models.retro.generation import GeneratedText
from engine.models.retro.network import PAD, RetroNetwork
from models.retro.chronicles import Chronicle, chronicle

TOKENS: Final = 512  # of a text
NOTHING: Final = 0  # an interval at which nothing is retrieved


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out chronicle: its facts and the tokens of the text that is to be predicted."""

    chronicle: Chronicle
    tokens: list[int]


class HeldOutTexts:
    """Chronicles of names never trained on, and the database of their stored tellings and of others'."""

    def __init__(
        self, tokenizer: Tokenizer, embed: Embed, texts: int, stored: int, chunk: int, seed: int = 1
    ) -> None:
        """Make `texts` texts; the database holds the tellings of `stored` chronicles, theirs among them."""
        rng = random.Random(f"held out {seed}")
        self.tokenizer = tokenizer
        self.chunk = chunk
        self._embed = embed
        told = [chronicle(rng, "evaluation") for _ in range(max(texts, stored))]
        self.texts = [HeldOut(c, self._ids(c.text)[:TOKENS]) for c in told[:texts]]
        self._stored = [self._ids(c.stored) for c in told]
        self._vectors: dict[tuple[int, int], Vectors] = {}

    @cached_property
    def database(self) -> ChunkDatabase:
        """The database, embedded when it is first asked for."""
        return ChunkDatabase(self._stored, self.chunk, self._embed)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def points(self, interval: int) -> list[int]:
        """Return the places of a text before which something is retrieved, the first after one chunk."""
        return list(range(self.chunk, TOKENS, interval)) if interval else []

    def queries(self, interval: int, stale: int) -> list[int]:
        """Return where the query of each retrieval ends: all but the first are stale."""
        return [point - (stale if n else 0) for n, point in enumerate(self.points(interval))]

    def neighbours(
        self, text: int, interval: int, stale: int, k: int, *, shifted: bool = True
    ) -> list[list[Neighbour]]:
        """Return the `k` neighbours of every retrieval for a text; a stale one's begin is shifted, if asked."""
        ends = self.queries(interval, stale)
        missing = [end for end in ends if (text, end) not in self._vectors]
        if missing:
            ids = self.texts[text].tokens
            found = self._embed([ids[max(0, end - self.chunk) : end] for end in missing])
            self._vectors |= {
                (text, end): vector for end, vector in zip(missing, found, strict=True)
            }
        rows = np.stack([self._vectors[text, end] for end in ends])
        numbers = np.argsort(-(rows @ self.database.vectors.T), axis=1, kind="stable")[:, :k]
        late = [0, *[stale * shifted] * (len(ends) - 1)]
        return [
            [self.database[n]._replace(begin=self.database[n].begin + s) for n in row]
            for row, s in zip(numbers.tolist(), late, strict=True)
        ]


@torch.inference_mode()
def losses(
    network: RetroNetwork, held: HeldOutTexts, interval: int, stale: int = 0, *, wrong: bool = False
) -> list[float]:
    """Return each text's mean loss, in nats a token, over the tokens after its first chunk.

    With `wrong`, the neighbours are those of the text before: what retrieval is worth that finds something else.
    """
    config = network.config
    out = []
    for number, text in enumerate(held.texts):
        ids = torch.tensor([text.tokens])
        points, tokens = held.points(interval), config.value
        neighbours = torch.zeros(1, len(points), config.neighbours, tokens, dtype=torch.long)
        if points:
            source = number - 1 if wrong else number
            found = held.neighbours(source % len(held.texts), interval, stale, config.neighbours)
            rows = [values(each, config.neighbours, tokens) for each in found]
            neighbours = torch.tensor([rows])
        logits = network(ids[:, :-1], neighbours, config.chunk, interval or 1)
        after = slice(config.chunk - 1, None)
        out.append(float(F.cross_entropy(logits[0, after], ids[0, config.chunk :])))
    return out


def perplexity(found: Sequence[float]) -> float:
    """Return the perplexity of mean losses of texts equally long."""
    return math.exp(sum(found) / len(found))


def mean95(found: Sequence[float], draws: int = 2000, seed: int = 1) -> tuple[float, float]:
    """Return the bootstrap interval (95 %) of the mean of one number for each text."""
    rng = np.random.default_rng(seed)
    means = np.asarray(found)[rng.integers(0, len(found), (draws, len(found)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def similarity(
    held: HeldOutTexts, embed: Embed, interval: int, stale: int, *, shifted: bool
) -> list[float]:
    """Return each text's mean cosine between what a stale query finds and what a fresh one does (its nearest chunk)."""
    out = []
    for number in range(len(held.texts)):
        late = held.neighbours(number, interval, stale, 1, shifted=shifted)[1:]
        fresh = held.neighbours(number, interval, 0, 1)[1:]
        pairs = [
            (a[0].value(held.chunk), b[0].value(held.chunk))
            for a, b in zip(late, fresh, strict=True)
            if a[0].begin < len(a[0].document)
        ]
        left, right = (embed([p[side] for p in pairs]) for side in (0, 1))
        out.append(float((left * right).sum(1).mean()))
    return out


def facts_after(text: HeldOut, tokenizer: Tokenizer, begin: int, end: int) -> list[tuple[str, str]]:
    """Return (entity, value) of the facts that the text states in sections that begin and end in [begin, end)."""
    place, out = 0, []
    told = {who.name: (who, keys) for who, keys in text.chronicle.told}
    for part in text.chronicle.text.split("# ")[1:]:
        name = part.split("\n", 1)[0]
        size = len(tokenizer.encode("# " + part, add_special_tokens=False).ids)
        if begin <= place and place + size <= end:
            who, keys = told[name]
            out += [(name, who.facts[key]) for key in keys]
        place += size
    return out


def right_facts(facts: Sequence[tuple[str, str]], said: str) -> list[bool]:
    """Return which facts a text states: its section with the entity's heading holds the value."""
    sections = [part.split("\n", 1) for part in said.split("# ")[1:]]
    bodies = {part[0].strip(): part[1] for part in sections if len(part) == 2}
    return [
        re.search(rf"\b{re.escape(value)}\b", bodies.get(name, ""), re.IGNORECASE) is not None
        for name, value in facts
    ]


def said_after(held: HeldOutTexts, prompt: Sequence[int], found: GeneratedText) -> str:
    """Return the text of a prompt and what was generated after it."""
    text: str = held.tokenizer.decode([*prompt, *(t for t in found.tokens if t != PAD)])
    return text
