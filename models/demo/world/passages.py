# ruff: noqa: SIM905 - lists of words are easier to read as text
"""Entities with facts, and the passages that state them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from models.demo.world import questions, scenery, statements, words
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


KIND_NAMES: Final = {
    "town": ("The town", "This town", "The place", "This place"),
    "guild": ("The company", "This company", "The firm", "This firm", "The business"),
    "ship": ("The ship", "This ship", "The vessel", "This vessel"),
}
LEADS: Final = (
    "Today", "For many years", "As everyone knows,", "By all accounts", "According to the records,",
    "It is said that", "These days", "In fact", "To this day", "As far as anyone knows,", "Nowadays",
    "Of course", "The chronicle says that", "Travellers report that", "At present",
)  # fmt: skip


GLUE: Final = tuple(
    "is was has had as the a of in for by with its to from on at and calls chose made named gave holds "
    "bears keeps takes became it there here who which that when since long first once only always".split()
)  # fmt: skip


def blur(rng: random.Random, template: str) -> str:
    """Return a training template with words replaced, dropped or added at random; slots stay.

    People state facts in more ways than anyone can list. What is left when words change is an
    entity and a value of the right kind near each other, and that is what a reader must go by.
    """
    rate = rng.choice((0.1, 0.25, 0.5))
    out: list[str] = []
    for word in template.split():
        chance = rng.random() / rate
        if "{" in word or chance > 1:
            out.append(word)
        elif chance < 0.6:
            end = word[-1] if word[-1] in ".," else ""
            out.append(" ".join(rng.choices(words.PLAIN, k=rng.choice((1, 1, 2)))) + end)
        elif chance < 0.75 and word[-1] not in ".,":
            continue
        else:
            out += [rng.choice(words.PLAIN), word]
    if rng.random() < 0.15:
        lead = rng.choice(LEADS)
        out = [lead, *out] if rng.random() < 0.6 else [*rng.choices(words.PLAIN, k=2), *out]
    return " ".join(out)


def loose(rng: random.Random, relation: str, *, named: bool) -> str:
    """Return a training template of no grammar: entity and value in either order, words between them.

    It stands for the many ways of stating a fact that no list has.
    """
    noun = rng.choice(questions.NOUNS[relation])
    subject = (
        "{e}"
        if named
        else rng.choice(("{S}", "{S}", f"{{P}} {noun}", f"{{P}} {rng.choice(words.PLAIN)}"))
    )
    slots = [subject, "{v}"]
    if rng.random() < 0.4:
        slots.reverse()
        if not named and rng.random() < 0.4:
            slots.pop()
    if rng.random() < 0.4 and noun not in subject:
        slots.insert(rng.randint(0, len(slots)), noun)
    out: list[str] = []
    for slot in slots:
        most = 3 if out else rng.choice((0, 0, 0, 1, 3))
        out += [rng.choice(rng.choice((GLUE, words.PLAIN))) for _ in range(rng.randint(0, most))]
        out.append(slot)
    if rng.random() < 0.4 or len(out) == 1:
        out += rng.choices(words.PLAIN, k=rng.randint(1, 3))
    return " ".join(out).replace("{S}", "{S}" if out[0] == "{S}" else "{s}") + "."


def remark(rng: random.Random, fillers: tuple[str, ...]) -> str:
    """Return a sentence for training that answers nothing: one of `fillers`, blurred or not."""
    text = rng.choice(fillers)
    return text if rng.random() < 0.4 else _capital(blur(rng, text))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


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
    return _capital(made)


def write(
    rng: random.Random,
    who: Entity,
    stated: list[str],
    *,
    page: bool,
    held_out: bool = False,
    blurred: bool = False,
) -> Passage:
    """Return a passage that states exactly the relations `stated`, in their order.

    A page has a title, an opening and perhaps a filler; otherwise the passage is the statements
    alone. `held_out` chooses ways of stating that training never uses; `blurred` is for training.
    """
    out: list[str] = []
    if page:
        opening = scenery.OPENINGS[who.kind]
        template = rng.choice(opening[-1:] if held_out else opening[:-1])
        if blurred and rng.random() < 0.6:
            template = blur(rng, template)
        out.append(sentence(rng, template, who, ""))
    for key in stated:
        named = not out or rng.random() < 0.35
        kind = statements.named if named else statements.referred
        template = rng.choice(kind(key, held_out=held_out))
        if blurred:
            if who.kind in KIND_NAMES and rng.random() < 0.25:
                template = template.replace("{S}", rng.choice(KIND_NAMES[who.kind]))
            way = rng.random()
            if way < 0.25:
                template = loose(rng, key, named=named)
            elif way < 0.6:
                template = blur(rng, template)
        out.append(sentence(rng, template, who, who.facts[key]))
    if page:
        fillers = scenery.FILLERS[who.kind]
        extra = remark(rng, fillers) if blurred else rng.choice(fillers)
        out.insert(rng.randint(1, len(out)), extra)
    text = " ".join(out)
    if page:
        text = f"# {who.name}\n\n{text}"
    return Passage(who, text, frozenset(stated))
