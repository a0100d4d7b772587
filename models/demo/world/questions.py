"""How people ask: at least 40 phrasings for each relation, 8 of each never used in training."""

from __future__ import annotations

import random
from functools import cache
from typing import Final

from models.demo.world.relations import RELATIONS

HELD_OUT: Final = 8
WHAT: Final = (
    "What is the {n} of {e}?",
    "What's the {n} of {e}?",
    "What is {e}'s {n}?",
    "Tell me the {n} of {e}.",
    "Tell me {e}'s {n}.",
    "Do you know the {n} of {e}?",
    "Could you give me the {n} of {e}?",
    "I would like to know the {n} of {e}.",
    "Name the {n} of {e}.",
    "{e}: what is the {n}?",
    "For {e}, what is the {n}?",
    "What {n} does {e} have?",
    "What do the passages give as the {n} of {e}?",
    "Which {n} is given for {e}?",
    "I am looking for {e}'s {n}.",
    "the {n} of {e}, please",
)
WHO: Final = (
    *(f.replace("What is", "Who is").replace("What's", "Who's") for f in WHAT[:10]),
    "{e}: who is the {n}?",
    "Which person is the {n} of {e}?",
    "Who is named as the {n} of {e}?",
    "Who do the passages name as {n} of {e}?",
    "I am looking for {e}'s {n}.",
    "the {n} of {e}, please",
)
NOUNS: Final[dict[str, tuple[str, ...]]] = {
    "river": ("river", "local river", "nearest river"),
    "mayor": ("mayor", "current mayor", "head of the town council"),
    "founded": ("founding year", "year of foundation", "founding date"),
    "export": ("main export", "chief export", "most important export"),
    "profession": ("profession", "occupation", "job", "trade"),
    "birthplace": ("birthplace", "place of birth", "home town"),
    "born": ("birth year", "year of birth", "date of birth"),
    "instrument": ("instrument", "musical instrument", "favourite instrument"),
    "founder": ("founder", "original founder", "first owner"),
    "seat": ("seat", "headquarters", "head office"),
    "product": ("product", "main product", "best known product"),
    "captain": ("captain", "master", "commander"),
    "port": ("home port", "port of registry", "home harbour"),
    "cargo": ("cargo", "usual cargo", "freight"),
}
OWN: Final[dict[str, tuple[str, ...]]] = {
    "river": (
        "Which river flows through {e}?",
        "Which river does {e} lie on?",
        "On which river is {e}?",
        "What river runs past {e}?",
        "{e} stands on which river?",
        "Which water flows by {e}?",
        "What is the name of the river at {e}?",
        "By which river was {e} built?",
        "If I follow the river in {e}, which one is it?",
        "What river would I cross in {e}?",
        "Which river goes through the town of {e}?",
        "Beside which river does {e} stand?",
    ),
    "mayor": (
        "Who governs {e}?",
        "Who runs the town of {e}?",
        "Who leads {e}?",
        "Who is in charge of {e}?",
        "Who was elected mayor in {e}?",
        "By whom is {e} governed?",
        "Who heads the council of {e}?",
        "Who holds the office of mayor in {e}?",
        "Which person governs {e}?",
        "Whom did {e} choose as mayor?",
        "Who is mayor in {e}?",
        "Who sits in the mayor's chair of {e}?",
    ),
    "founded": (
        "When was {e} founded?",
        "In what year was {e} founded?",
        "In which year did {e} begin?",
        "How old is {e}, that is, since when does it exist?",
        "When did settlers found {e}?",
        "When was the town of {e} established?",
        "What year was {e} built?",
        "Since when has {e} existed?",
        "{e} dates from which year?",
        "When does {e} date from?",
        "In what year did {e} get its start?",
        "When did {e} come into being?",
    ),
    "export": (
        "What does {e} export?",
        "What does {e} sell abroad?",
        "Which goods leave {e}?",
        "What is {e} known for selling?",
        "What do the traders of {e} sell?",
        "Which goods does {e} export most?",
        "What does {e} trade in?",
        "What do merchants buy in {e}?",
        "By selling what does {e} live?",
        "What is sold abroad by {e}?",
        "What do other towns buy from {e}?",
        "What is sent out from {e}?",
    ),
    "profession": (
        "What does {e} do for a living?",
        "What does {e} do?",
        "What does {e} work as?",
        "How does {e} earn a living?",
        "As what does {e} work?",
        "What kind of work does {e} do?",
        "What line of work is {e} in?",
        "By trade, what is {e}?",
        "What was {e} trained as?",
        "Which profession does {e} follow?",
        "What is {e} by profession?",
        "What work has {e}?",
    ),
    "birthplace": (
        "Where was {e} born?",
        "In which town was {e} born?",
        "Where does {e} come from?",
        "Where is {e} from?",
        "In what place was {e} born?",
        "Which town is {e} from?",
        "Which place did {e} come from?",
        "From which town does {e} come?",
        "What town was {e} born in?",
        "Where did the life of {e} begin?",
        "Which town is the birthplace of {e}?",
        "Where did {e} first see the light?",
    ),
    "born": (
        "When was {e} born?",
        "In what year was {e} born?",
        "In which year was {e} born?",
        "How old is {e}, or rather when was the birth?",
        "What year was {e} born in?",
        "Since which year has {e} lived?",
        "When did {e} come into the world?",
        "{e} was born when?",
        "{e} was born in which year?",
        "Which year saw the birth of {e}?",
        "When was the birth of {e}?",
        "Tell me when {e} was born.",
    ),
    "instrument": (
        "What does {e} play?",
        "Which instrument does {e} play?",
        "What instrument does {e} play?",
        "What can {e} play?",
        "On what does {e} make music?",
        "Which instrument did {e} learn?",
        "What does {e} play in the evening?",
        "Which instrument is {e} good at?",
        "What would {e} bring to a concert?",
        "What instrument did {e} study?",
        "What has {e} learned to play?",
        "With which instrument does {e} perform?",
    ),
    "founder": (
        "Who founded {e}?",
        "Who started {e}?",
        "Who set up {e}?",
        "By whom was {e} founded?",
        "Who established {e}?",
        "Who created {e}?",
        "Whose idea was {e}?",
        "Who opened {e}?",
        "Who was it that founded {e}?",
        "Who began {e}?",
        "Which person started {e}?",
        "Who built up {e} from nothing?",
    ),
    "seat": (
        "Where is {e} based?",
        "Where does {e} have its seat?",
        "In which town is {e}?",
        "Where is {e} located?",
        "Where can I find {e}?",
        "In what town is {e} based?",
        "Where is the head office of {e}?",
        "Which town is home to {e}?",
        "From where does {e} operate?",
        "Where are the offices of {e}?",
        "Where does {e} have its headquarters?",
        "Where would I visit {e}?",
    ),
    "product": (
        "What does {e} make?",
        "What does {e} produce?",
        "What is made by {e}?",
        "What does {e} manufacture?",
        "What goods does {e} make?",
        "What can I buy from {e}?",
        "What comes out of the workshops of {e}?",
        "Which goods are made at {e}?",
        "What do the workers of {e} make?",
        "What is {e} known for making?",
        "What sort of things does {e} produce?",
        "What does {e} sell?",
    ),
    "captain": (
        "Who commands {e}?",
        "Who is captain of {e}?",
        "Who sails {e}?",
        "Who is in command of {e}?",
        "Under whom does {e} sail?",
        "Who steers {e}?",
        "By whom is {e} commanded?",
        "Who gives the orders on {e}?",
        "Who leads the crew of {e}?",
        "Who is captain on board {e}?",
        "Who is at the helm of {e}?",
        "Who captains {e}?",
    ),
    "port": (
        "Where is {e} registered?",
        "Which port does {e} call home?",
        "Where is the home of {e}?",
        "Which harbour does {e} belong to?",
        "From which port does {e} sail?",
        "In which harbour does {e} winter?",
        "To which port does {e} return?",
        "Where does {e} lie when not at sea?",
        "Which town is the home port of {e}?",
        "In what port is {e} at home?",
        "What port does {e} sail from?",
        "Where is {e} kept?",
    ),
    "cargo": (
        "What does {e} carry?",
        "What does {e} transport?",
        "What is {e} loaded with?",
        "What is in the hold of {e}?",
        "What is on board {e}?",
        "Which goods does {e} carry?",
        "What kind of freight does {e} carry?",
        "What does {e} bring across the sea?",
        "With what is {e} loaded?",
        "What does the crew of {e} load?",
        "What does {e} ship?",
        "What would I find in the hold of {e}?",
    ),
}
FOLLOW: Final = (
    "And {p} {n}?", "What about {p} {n}?", "And the {n}?", "Now {p} {n}, please.",
    "Can you also tell me {p} {n}?", "I also need {p} {n}.",
)  # fmt: skip
BEFORE: Final = (
    "Please: ", "I wonder, ", "Quick question: ", "Tell me, ", "Well, ", "Sorry, ",
    "One more thing: ", "Can you tell me: ", "Another question. ", "Hi, ", "So, ", "Now, ",
)  # fmt: skip
AFTER: Final = (
    " Thanks.",
    " Please be brief.",
    " I forgot.",
    " Do you know?",
    " Thank you!",
    " I need it today.",
)
SWITCH: Final = (
    "And {e}?",
    "What about {e}?",
    "And for {e}?",
    "The same for {e}, please.",
    "And {e}'s?",
)


@cache
def phrasings(relation: str) -> tuple[str, ...]:
    """Return every question phrasing of `relation`, each with one `{e}`, in a fixed order."""
    frames = WHO if RELATIONS[relation].value == "person" else WHAT
    made = [f.replace("{n}", noun) for noun in NOUNS[relation] for f in frames]
    return tuple(dict.fromkeys([*OWN[relation], *made]))


@cache
def split(relation: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (training phrasings, held-out phrasings): half of the held-out are the relation's own."""
    rng = random.Random(f"held-out phrasings of {relation}")
    own = list(OWN[relation])
    made = [p for p in phrasings(relation) if p not in own]
    held = rng.sample(own, HELD_OUT // 2) + rng.sample(made, HELD_OUT // 2)
    return tuple(p for p in phrasings(relation) if p not in held), tuple(held)
