"""The sample collection `handbook`: pages of entities that training never saw, and questions to ask."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from models.demo.world import scenery, statements
from models.demo.world.conversations import ask
from models.demo.world.passages import Entity, entity, sentence
from models.demo.world.relations import KINDS, OF_KIND

PAGES: Final = 300
SEED: Final = "handbook 1"
HARD: Final = re.compile(r"[bcdfghjklmnpqrstvwxz]{3}|[aeiou]{3}|x|qu|ae|ei|y[^a-z]")


@dataclass(frozen=True, slots=True)
class Page:
    """One page: the file's name, its Markdown, and the entity it is about."""

    name: str
    text: str
    who: Entity


@dataclass(frozen=True, slots=True)
class Question:
    """One question: its expected value, and the name of the page that says it."""

    text: str
    value: str
    page: str
    relation: str


def _plain(who: Entity) -> bool:
    """Say whether every name on the page is easy to say."""
    words = [who.name.lower(), *(v.lower() for v in who.facts.values() if v.istitle())]
    return not any(HARD.search(word + " ") for word in words)


def _apart(name: str, taken: set[str]) -> bool:
    """Say whether no word of `name` begins like a taken one, so that a search can tell them apart."""
    return all(part[:4].lower() not in taken for part in name.split()[:2])


def _body(rng: random.Random, who: Entity) -> str:
    """Return an opening, every fact, and fillers: one chunk of about 40 to 60 words."""
    out = [sentence(rng, scenery.OPENINGS[who.kind][-1], who, "")]
    keys = list(OF_KIND[who.kind])
    rng.shuffle(keys)
    for n, key in enumerate(keys):
        kind = statements.named if n % 2 == 0 else statements.referred
        template = rng.choice(kind(key, held_out=True))
        out.append(sentence(rng, template, who, who.facts[key]))
    out.insert(2, rng.choice(scenery.FILLERS[who.kind]))
    return " ".join(out)


@cache
def pages() -> tuple[Page, ...]:
    """Return the pages, always the same, names unlike one another."""
    rng = random.Random(SEED)
    taken: set[str] = set()
    out: list[Page] = []
    while len(out) < PAGES:
        who = entity(rng, KINDS[len(out) % len(KINDS)], "handbook")
        if not (_plain(who) and _apart(who.name, taken)):
            continue
        parts = who.name.split()
        taken |= {p[:4].lower() for p in (parts[:1] if who.kind == "guild" else parts)}
        name = who.name.lower().replace(" ", "-") + ".md"
        out.append(Page(name, f"# {who.name}\n\n{_body(rng, who)}\n", who))
    return tuple(out)


def write_handbook(directory: Path) -> int:
    """Write every page as a Markdown file into `directory` (made if missing); return how many."""
    directory.mkdir(parents=True, exist_ok=True)
    for page in pages():
        (directory / page.name).write_text(page.text, encoding="utf-8")
    return len(pages())


def questions(count: int = 1000, seed: str = "handbook questions") -> Iterator[Question]:
    """Yield questions in phrasings unseen in training, over all pages in turn: the same every time."""
    rng = random.Random(seed)
    for index in range(count):
        page = pages()[index % PAGES]
        relation = rng.choice(OF_KIND[page.who.kind])
        text = ask(rng, relation, page.who, held_out=True)
        yield Question(text, page.who.facts[relation], page.name, relation)


def absent_questions(count: int = 200, seed: str = "handbook absent") -> Iterator[str]:
    """Yield questions about entities that no page mentions: the model is to refuse them."""
    rng = random.Random(seed)
    known = {page.who.name for page in pages()}
    for index in range(count):
        who = entity(rng, KINDS[index % len(KINDS)], "handbook")
        while who.name in known:
            who = entity(rng, who.kind, "handbook")
        yield ask(rng, rng.choice(OF_KIND[who.kind]), who, held_out=True)
