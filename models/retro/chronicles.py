"""Chronicles: generated documents about some fifteen invented entities, each told twice, in different words.

One telling stands in the retrieval database; the other is what the model learns to continue, or is measured on. Names
and values are made anew for each chronicle and come from pools that share none, so what a held-out chronicle says can
be known from the database alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from models.demo.world import scenery, statements
from models.demo.world.names import Pool
from models.demo.world.passages import Entity, entity, sentence
from models.demo.world.relations import KINDS, OF_KIND

ENTITIES: Final = (13, 16)
REORDERED: Final = 0.3  # of sections, whose facts one telling has in another order


@dataclass(frozen=True, slots=True)
class Chronicle:
    """Two tellings of the same facts; `told` says of each entity which relations they state."""

    stored: str
    text: str
    told: tuple[tuple[Entity, tuple[str, ...]], ...]


def chronicle(rng: random.Random, pool: Pool) -> Chronicle:
    """Return a chronicle whose names come from `pool`."""
    told = []
    for _ in range(rng.randint(*ENTITIES)):
        who = entity(rng, rng.choice(KINDS), pool)
        keys = list(OF_KIND[who.kind])
        told.append((who, tuple(rng.sample(keys, rng.choice((2, 3))))))
    return Chronicle(_telling(rng, told), _telling(rng, told), tuple(told))


def _telling(rng: random.Random, told: list[tuple[Entity, tuple[str, ...]]]) -> str:
    return "\n\n".join(_section(rng, who, list(keys)) for who, keys in told) + "\n"


def _section(rng: random.Random, who: Entity, keys: list[str]) -> str:
    """Return a heading and the facts, the first by name; some sections open with a remark."""
    if rng.random() < REORDERED:
        rng.shuffle(keys)
    out = []
    if rng.random() < 0.3:
        out.append(sentence(rng, rng.choice(scenery.OPENINGS[who.kind]), who, ""))
    for n, key in enumerate(keys):
        named = n == 0 or rng.random() < 0.3
        kind = statements.named if named else statements.referred
        template = rng.choice(kind(key, held_out=False))
        out.append(sentence(rng, template, who, who.facts[key]))
    return f"# {who.name}\n\n{' '.join(out)}"
