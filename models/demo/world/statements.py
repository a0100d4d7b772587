"""How passages state a fact, with the entity's name or a pronoun; some ways never used in training."""

from __future__ import annotations

from functools import cache
from typing import Final

from models.demo.world.questions import NOUNS

# The last two of each list are held out. {e} the entity, {v} the value.
NAMED: Final[dict[str, tuple[str, ...]]] = {
    "river": (
        "{e} lies on the river {v}.",
        "The river {v} flows through {e}.",
        "{e} was built beside the {v}.",
        "The old bridge of {e} crosses the {v}.",
        "The {v} runs past the walls of {e}.",
        "{e} stands where the {v} bends.",
        "Boats reach {e} by the river {v}.",
        "{e} draws its water from the river {v}.",
    ),
    "mayor": (
        "{v} is the mayor of {e}.",
        "{e} is governed by {v}.",
        "{e} has a mayor named {v}.",
        "The people of {e} elected {v} as mayor.",
        "{v} leads the council of {e}.",
        "{v} has run {e} for years.",
        "In {e} the office of mayor is held by {v}.",
        "{e} chose {v} as its mayor.",
    ),
    "founded": (
        "{e} was founded in {v}.",
        "{e} dates from the year {v}.",
        "Settlers founded {e} in {v}.",
        "The town of {e} was established in {v}.",
        "{e} has existed since {v}.",
        "In {v} the first houses of {e} were built.",
        "{e} was begun in the year {v}.",
        "In {v} families from the coast founded {e}.",
    ),
    "export": (
        "{e} exports {v}.",
        "The traders of {e} sell {v}.",
        "{e} is known for its {v}.",
        "{e} sells {v} abroad.",
        "Most of what leaves {e} is {v}.",
        "Merchants come to {e} to buy {v}.",
        "{e} lives by selling {v}.",
        "The chief export of {e} is {v}.",
    ),
    "profession": (
        "{e} works as a {v}.",
        "{e} is a {v}.",
        "{e} earns a living as a {v}.",
        "{e} was trained as a {v}.",
        "{e}, a {v} by trade, is well known.",
        "{e} has long been a {v}.",
        "By profession {e} is a {v}.",
        "{e} became a {v} when young.",
    ),
    "birthplace": (
        "{e} was born in {v}.",
        "{e} comes from {v}.",
        "{v} is the birthplace of {e}.",
        "The life of {e} began in {v}.",
        "{e} is a native of {v}.",
        "{e} was a child of {v}.",
        "{e} first saw the light in {v}.",
        "The parents of {e} lived in {v}, and there {e} was born.",
    ),
    "born": (
        "{e} was born in {v}.",
        "{e} was born in the year {v}.",
        "The birth of {e} is dated {v}.",
        "In {v} {e} came into the world.",
        "The year {v} saw the birth of {e}.",
        "{e} has lived since {v}.",
        "{e}, born in {v}, is remembered by many.",
        "The records date the birth of {e} to {v}.",
    ),
    "instrument": (
        "{e} plays the {v}.",
        "{e} learned to play the {v}.",
        "{e} is good at the {v}.",
        "In the evening {e} plays the {v}.",
        "{e} studied the {v}.",
        "Friends hear {e} on the {v}.",
        "{e} performs on the {v}.",
        "{e} has played the {v} since childhood.",
    ),
    "founder": (
        "{e} was founded by {v}.",
        "{v} founded {e}.",
        "{v} started {e}.",
        "{e} was the idea of {v}.",
        "{e} was set up by {v}.",
        "{v} opened {e} with two helpers.",
        "{v} established {e}.",
        "It was {v} who began {e}.",
    ),
    "seat": (
        "{e} is based in {v}.",
        "{e} has its seat in {v}.",
        "The head office of {e} is in {v}.",
        "{v} is home to {e}.",
        "The offices of {e} are in {v}.",
        "{e} operates from {v}.",
        "{e} is located in {v}.",
        "{e} has its headquarters in {v}.",
    ),
    "product": (
        "{e} makes {v}.",
        "{e} produces {v}.",
        "The workers of {e} make {v}.",
        "{e} is known for its {v}.",
        "The workshops of {e} turn out {v}.",
        "{v} are made by {e}.",
        "{e} manufactures {v}.",
        "People buy {v} from {e}.",
    ),
    "captain": (
        "{e} is commanded by {v}.",
        "{v} is the captain of {e}.",
        "{v} commands {e}.",
        "{e} sails under {v}.",
        "The crew of {e} is led by {v}.",
        "{v} stands at the helm of {e}.",
        "{v} is in command of {e}.",
        "On board {e} the orders come from {v}.",
    ),
    "port": (
        "{e} is registered in {v}.",
        "The home port of {e} is {v}.",
        "{e} sails from {v}.",
        "{e} belongs to the harbour of {v}.",
        "{e} returns each autumn to {v}.",
        "{v} is the home of {e}.",
        "{e} winters in the harbour of {v}.",
        "{e} calls {v} its home port.",
    ),
    "cargo": (
        "{e} carries {v}.",
        "{e} is loaded with {v}.",
        "The hold of {e} is full of {v}.",
        "{e} transports {v}.",
        "{e} brings {v} across the sea.",
        "The crew of {e} loads {v}.",
        "The freight of {e} is {v}.",
        "{e} mostly carries {v}.",
    ),
}
# The last one of each list is held out. {S} It/He/She, {P} Its/His/Her, {t} the entity's kind.
REFERRED: Final[dict[str, tuple[str, ...]]] = {
    "river": (
        "{S} lies on the river {v}.",
        "The river {v} flows through the town.",
        "{P} bridge crosses the {v}.",
        "{S} was built beside the {v}.",
        "{S} stands on the {v}.",
    ),
    "mayor": (
        "{S} is governed by {v}.",
        "{v} is the mayor.",
        "{P} people elected {v} as mayor.",
        "{v} leads the council.",
        "{S} has {v} as mayor.",
    ),
    "founded": (
        "{S} was founded in {v}.",
        "{S} dates from {v}.",
        "Settlers came here in {v}.",
        "{P} first houses were built in {v}.",
        "{S} was established in {v}.",
    ),
    "export": (
        "{S} exports {v}.",
        "{P} traders sell {v}.",
        "{S} is known for its {v}.",
        "Merchants come here to buy {v}.",
        "{S} sells {v} abroad.",
    ),
    "profession": (
        "{S} works as a {v}.",
        "{S} is a {v}.",
        "{S} earns a living as a {v}.",
        "{S} was trained as a {v}.",
        "{S} became a {v}.",
    ),
    "birthplace": (
        "{S} was born in {v}.",
        "{S} comes from {v}.",
        "{P} life began in {v}.",
        "{S} is a native of {v}.",
        "{P} birthplace is {v}.",
    ),
    "born": (
        "{S} was born in {v}.",
        "{S} was born in the year {v}.",
        "{P} birth is dated {v}.",
        "{S} has lived since {v}.",
        "{P} birth fell in the year {v}.",
    ),
    "instrument": (
        "{S} plays the {v}.",
        "{S} learned to play the {v}.",
        "{S} is good at the {v}.",
        "In the evening {s} plays the {v}.",
        "{S} studied the {v}.",
    ),
    "founder": (
        "{S} was founded by {v}.",
        "{S} was the idea of {v}.",
        "{v} started it.",
        "{S} was set up by {v}.",
        "{P} founder was {v}.",
    ),
    "seat": (
        "{S} is based in {v}.",
        "{S} has its seat in {v}.",
        "{P} head office is in {v}.",
        "{P} offices are in {v}.",
        "{S} has its headquarters in {v}.",
    ),
    "product": (
        "{S} makes {v}.",
        "{S} produces {v}.",
        "{P} workers make {v}.",
        "{S} is known for its {v}.",
        "{S} manufactures {v}.",
    ),
    "captain": (
        "{S} is commanded by {v}.",
        "{v} is the captain.",
        "{P} crew is led by {v}.",
        "{S} sails under {v}.",
        "{v} is in command.",
    ),
    "port": (
        "{S} is registered in {v}.",
        "{P} home port is {v}.",
        "{S} sails from {v}.",
        "{S} belongs to the harbour of {v}.",
        "{S} winters in the harbour of {v}.",
    ),
    "cargo": (
        "{S} carries {v}.",
        "{S} is loaded with {v}.",
        "{P} hold is full of {v}.",
        "{S} transports {v}.",
        "{S} mostly carries {v}.",
    ),
}
FRAMES: Final = (
    "The {n} of {e} is {v}.",
    "{e}'s {n} is {v}.",
    "{v} is the {n} of {e}.",
    "The {n} given for {e} is {v}.",
)


@cache
def named(relation: str, *, held_out: bool) -> tuple[str, ...]:
    """Return statements that name the entity; with `held_out`, those never used in training."""
    if held_out:
        return NAMED[relation][-2:]
    made = [f.replace("{n}", noun) for noun in NOUNS[relation] for f in FRAMES]
    return (*NAMED[relation][:-2], *(f for f in made if f not in NAMED[relation]))


@cache
def referred(relation: str, *, held_out: bool) -> tuple[str, ...]:
    """Return statements that refer to the entity; with `held_out`, those never used in training."""
    if held_out:
        return REFERRED[relation][-1:]
    made = [f"{{P}} {noun} is {{v}}." for noun in NOUNS[relation]]
    return (*REFERRED[relation][:-1], *(f for f in made if f not in REFERRED[relation]))
