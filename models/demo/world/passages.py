"""Entities with facts, and the passages that state them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from models.demo.world import scenery, statements
from models.demo.world.names import Pool
from models.demo.world.relations import OF_KIND, RELATIONS, name_of, value_of


@dataclass(slots=True)
class Entity:
    """One entity: its facts by relation, and the words that refer to it (subject, possessive)."""

    name: str
    kind: str
    facts: dict[str, str]
    subject: str
    possessive: str


@dataclass(slots=True)
class Passage:
    """A text about one entity, and the relations it states."""

    entity: Entity
    text: str
    stated: frozenset[str] = field(default_factory=frozenset)


def entity(rng: random.Random, kind: str, pool: Pool) -> Entity:
    """Return a new entity with a value for every relation of its kind."""
    facts = {key: value_of(rng, RELATIONS[key], pool) for key in OF_KIND[kind]}
    pronoun = rng.choice(("He", "She")) if kind == "person" else "It"
    possessive = {"He": "His", "She": "Her", "It": "Its"}[pronoun]
    return Entity(name_of(rng, kind, pool), kind, facts, pronoun, possessive)


def sentence(rng: random.Random, template: str, who: Entity, value: str) -> str:
    """Return `template` filled in, starting with a capital."""
    short = who.name
    if who.kind == "ship" and rng.random() < 0.4:
        short = f"the {short}"
    made = (
        template.replace("{S}", who.subject)
        .replace("{s}", who.subject.lower())
        .replace("{P}", who.possessive)
        .replace("{e}", short)
        .replace("{v}", value)
    )
    for vowel in "aeio":
        made = made.replace(f" a {vowel}", f" an {vowel}")
    return made[0].upper() + made[1:]


def write(
    rng: random.Random, who: Entity, stated: list[str], *, page: bool, held_out: bool = False
) -> Passage:
    """Return a passage that states exactly the relations `stated`, in their order.

    A page has a title, an opening and perhaps a filler; otherwise the passage is the statements
    alone. `held_out` chooses ways of stating that training never uses.
    """
    out: list[str] = []
    if page:
        opening = scenery.OPENINGS[who.kind]
        out.append(sentence(rng, rng.choice(opening[-1:] if held_out else opening[:-1]), who, ""))
    for key in stated:
        named = not out or rng.random() < 0.35
        kind = statements.named if named else statements.referred
        template = rng.choice(kind(key, held_out=held_out))
        out.append(sentence(rng, template, who, who.facts[key]))
    if page:
        at = rng.randint(1, len(out))
        out.insert(at, rng.choice(scenery.FILLERS[who.kind]))
    text = " ".join(out)
    if page:
        text = f"# {who.name}\n\n{text}"
    return Passage(who, text, frozenset(stated))
