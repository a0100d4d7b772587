# ruff: noqa: SIM905 - lists of words are easier to read as text
"""What can be said about an entity: its kind, its relations, and the values each may take."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

from models.demo.world import names
from models.demo.world.names import Pool


@dataclass(frozen=True, slots=True)
class Relation:
    """One relation: `noun` is the word the answer uses; `value` names the kind of its values."""

    key: str
    kind: str
    noun: str
    value: str


RELATIONS: Final[dict[str, Relation]] = {
    key: Relation(key, kind, noun, value)
    for key, kind, noun, value in (
        ("river", "town", "river", "place"),
        ("mayor", "town", "mayor", "person"),
        ("founded", "town", "founding year", "year"),
        ("export", "town", "main export", "export"),
        ("profession", "person", "profession", "profession"),
        ("birthplace", "person", "birthplace", "place"),
        ("born", "person", "birth year", "year"),
        ("instrument", "person", "instrument", "instrument"),
        ("founder", "guild", "founder", "person"),
        ("seat", "guild", "seat", "place"),
        ("product", "guild", "product", "product"),
        ("captain", "ship", "captain", "person"),
        ("port", "ship", "home port", "place"),
        ("cargo", "ship", "cargo", "cargo"),
    )
}
KINDS: Final = ("town", "person", "guild", "ship")
OF_KIND: Final = {
    kind: tuple(r.key for r in RELATIONS.values() if r.kind == kind) for kind in KINDS
}
WORDS: Final[dict[str, tuple[str, ...]]] = {
    "export": tuple(
        "salt amber copper honey timber wool silk olives tea marble saffron tin "
        "barley cheese linen pepper cotton slate wine almonds figs chalk sugar pearls".split()
    ),
    "profession": tuple(
        "baker surgeon lawyer weaver astronomer carpenter painter teacher blacksmith botanist printer judge "
        "tailor miller architect chemist poet gardener librarian potter farmer jeweller mason historian".split()
    ),
    "instrument": tuple(
        "flute cello harp trumpet violin lute piano drum oboe "
        "clarinet organ banjo mandolin bagpipe zither horn guitar accordion".split()
    ),
    "product": tuple(
        "clocks lanterns boots paper glass bells carpets ropes candles knives barrels lenses "
        "saddles tiles hats ink soap bricks chairs maps gloves kettles mirrors nets".split()
    ),
    "cargo": tuple(
        "coal rice oranges iron grain coffee cocoa oil sulphur flour tar sand "
        "bananas hides lemons corn steel dates potash nutmeg cement hemp ginger apples".split()
    ),
}


def value_of(rng: random.Random, relation: Relation, pool: Pool) -> str:
    """Return a random value for `relation`; names come from `pool`."""
    if relation.value == "place":
        return names.place(rng, pool)
    if relation.value == "person":
        return names.person(rng, pool)
    if relation.value == "year":
        return str(rng.randint(1100, 1989))
    return rng.choice(WORDS[relation.value])


def name_of(rng: random.Random, kind: str, pool: Pool) -> str:
    """Return a new entity's name."""
    maker = {"town": names.place, "person": names.person, "guild": names.guild, "ship": names.ship}
    return maker[kind](rng, pool)


def answer(relation: Relation, entity: str, value: str, cite: int) -> str:
    """Return the one answer that counts as exact: relation and entity restated, value, citation."""
    return f"The {relation.noun} of {entity} is {value} [{cite}]."


REFUSAL: Final = "The passages do not say."  # of questions about something else altogether


def missing(relation: Relation, entity: str) -> str:
    """Return the refusal of a fact that no passage states.

    It differs from `answer` only from the place of the value on: there the model has restated what
    it looks for, and looks.
    """
    return f"The {relation.noun} of {entity} is not in the passages."


def refuses(text: str) -> bool:
    """Return whether `text` says, and says only, that the passages do not answer."""
    return (
        text == REFUSAL or re.fullmatch(r"The .+ of .+ is not in the passages\.", text) is not None
    )
