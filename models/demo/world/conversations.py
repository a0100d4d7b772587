"""Conversations over passages: what the model is trained on, and how a turn is put to it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

from models.demo.world import questions, relations, words
from models.demo.world.names import Pool
from models.demo.world.passages import Entity, Passage, entity, write
from models.demo.world.relations import KINDS, OF_KIND, REFUSAL, RELATIONS
from models.demo.world.talk import EMPTY, prose, stray, talk

Role = Literal["system", "user", "assistant"]
SYSTEM: Final = (
    "You are a helpful assistant.",
    "Answer from the passages.",
    "Be brief.",
    "Answer only from the passages, and cite them.",
    "You answer questions about documents.",
)


@dataclass(slots=True)
class Message:
    """One message; `weight` says whether the loss counts its text (assistant messages only)."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Shape:
    """How large and hard training conversations are: ranges are inclusive."""

    passages: tuple[int, int]
    facts: tuple[int, int]
    turns: tuple[int, int]
    page: float = 0.0  # share with titles, openings and fillers
    refuse: float = 0.2
    follow: float = 0.2  # share of later turns that refer to the turn before
    small_talk: float = 0.0
    regroup: float = 0.0  # share of later turns that bring new passages
    one_kind: float = 0.6  # share where all passages are about one kind of entity
    shared: float = 0.0  # share of those where most passages state one relation


def ground(passages: list[str], question: str) -> str:
    """Return a grounded user turn: exactly what `grounding.jinja` renders."""
    if not passages:
        return f"No passages.\n\nQuestion: {question}"
    lines = (f"[{n}] {' '.join(text.split())}" for n, text in enumerate(passages, 1))
    return "\n".join(lines) + f"\n\nQuestion: {question}"


def ask(rng: random.Random, relation: str, who: Entity, *, held_out: bool) -> str:
    """Return a question for `relation` of `who`; with `held_out`, in an unseen phrasing."""
    train, held = questions.split(relation)
    name = who.name
    if who.kind == "ship" and rng.random() < 0.4:
        name = f"the {name}"
    text = rng.choice(held if held_out else train).replace("{e}", name)
    text = text[0].upper() + text[1:] if text[0] != "t" or rng.random() < 0.5 else text
    return text if held_out else vary(rng, text, name)


def vary(rng: random.Random, text: str, name: str) -> str:
    """Return a training question as people type: some with a word before or after, or less careful."""
    way = rng.random()
    small = text if text.startswith(name) else text[0].lower() + text[1:]
    if way < 0.1:
        return rng.choice(questions.BEFORE) + small
    if way < 0.15:
        return text + rng.choice(questions.AFTER)
    if way < 0.22:
        return text.rstrip("?.")
    if way < 0.27:
        return small
    if way < 0.37:
        parts = text.split()
        for _ in range(rng.randint(1, 3)):
            parts.insert(rng.randint(1, len(parts)), rng.choice(words.PLAIN))
        return " ".join(parts)
    return text


def scene(rng: random.Random, shape: Shape, pool: Pool) -> list[Passage]:
    """Return shuffled passages; names differ, but some entities have two passages."""
    count = rng.randint(*shape.passages)
    page = rng.random() < shape.page
    kind = rng.choice(KINDS) if rng.random() < shape.one_kind else None
    focus = rng.choice(OF_KIND[kind]) if kind and rng.random() < shape.shared else None
    out: list[Passage] = []
    while len(out) < count:
        who = entity(rng, kind or rng.choice(KINDS), pool)
        keys = list(OF_KIND[who.kind])
        rng.shuffle(keys)
        size = min(rng.randint(*shape.facts), len(keys))
        if focus and rng.random() < 0.75:
            keys.remove(focus)
            keys.insert(rng.randrange(size), focus)
        out.append(write(rng, who, keys[:size], page=page, blurred=True))
        rest = keys[size : size + rng.randint(*shape.facts)]
        if rest and len(out) < count and rng.random() < 0.25:
            out.append(write(rng, who, rest, page=page, blurred=True))
    rng.shuffle(out)
    return out


def answer_from(passages: list[Passage], who: Entity, relation: str) -> str:
    """Return the exact answer from `passages`, or that it is missing."""
    for n, p in enumerate(passages, 1):
        if p.entity is who and relation in p.stated:
            return relations.answer(RELATIONS[relation], who.name, who.facts[relation], n)
    return relations.missing(RELATIONS[relation], who.name)


def pick(
    rng: random.Random, passages: list[Passage], shape: Shape, pool: Pool
) -> tuple[Entity, str]:
    """Return what to ask: a uniform passage's fact, or something the passages do not say.

    What is absent is either a relation of an entity that is there, preferably one that another
    entity's passage states, or a relation that is there, of an entity that is not.
    """
    if rng.random() >= shape.refuse:
        p = rng.choice(passages)
        return p.entity, rng.choice(sorted(p.stated))
    if rng.random() < 0.5:
        options = [
            (p.entity, key)
            for p in passages
            for key in OF_KIND[p.entity.kind]
            if not any(q.entity is p.entity and key in q.stated for q in passages)
        ]
        there = {key for p in passages for key in p.stated}
        hard = [o for o in options if o[1] in there]
        if options:
            return rng.choice(hard or options)
    p = rng.choice(passages)
    return entity(rng, p.entity.kind, pool), rng.choice(sorted(p.stated))


def pick_new(
    rng: random.Random,
    passages: list[Passage],
    shape: Shape,
    pool: Pool,
    asked: set[tuple[str, str]],
) -> tuple[Entity, str]:
    """Return what to ask that is not in `asked`, mostly: an answer given before could be copied."""
    who, relation = pick(rng, passages, shape, pool)
    for _ in range(6):
        if (who.name, relation) not in asked:
            break
        who, relation = pick(rng, passages, shape, pool)
    return who, relation


def follow_up(
    rng: random.Random, last: tuple[Entity, str], passages: list[Passage]
) -> tuple[Entity, str, str] | None:
    """Return (entity, relation, question) of a turn that leans on the last, or None.

    It asks for another relation of the same entity, or for the same relation of another one; in
    most cases one that `passages` state, where there is one.
    """
    who, relation = last
    stated = rng.random() < 0.75
    if rng.random() < 0.6:
        others = [k for k in OF_KIND[who.kind] if k != relation]
        there = [k for k in others if any(p.entity is who and k in p.stated for p in passages)]
        key = rng.choice(there if stated and there else others)
        noun = rng.choice(questions.NOUNS[key])
        frame = rng.choice(questions.FOLLOW)
        return who, key, frame.replace("{p}", who.possessive.lower()).replace("{n}", noun)
    same = [p for p in passages if p.entity.kind == who.kind and p.entity is not who]
    if not same:
        return None
    known = [p for p in same if relation in p.stated]
    other = rng.choice(known if stated and known else same).entity
    return other, relation, rng.choice(questions.SWITCH).replace("{e}", other.name)


def regrouped(
    rng: random.Random, passages: list[Passage], last: Entity | None, shape: Shape, pool: Pool
) -> list[Passage]:
    """Return the passages of a later turn: some of those before, mostly those about `last`, and new ones."""
    held = last is not None and rng.random() < 0.8
    kept = [p for p in passages if (held and p.entity is last) or rng.random() < 0.25]
    out = [*kept, *scene(rng, shape, pool)][: shape.passages[1]]
    rng.shuffle(out)
    return out


def opening(rng: random.Random, shape: Shape, pool: Pool) -> list[tuple[str, str]]:
    """Return the turns before the first passages that matter: mostly none."""
    out = []
    if rng.random() < shape.small_talk:
        out.append(talk(rng))
    if rng.random() < shape.small_talk:
        who = entity(rng, rng.choice(KINDS), pool)
        question = ask(rng, rng.choice(OF_KIND[who.kind]), who, held_out=False)
        if rng.random() < 0.3:
            question = stray(rng, pool)
        if rng.random() < 0.6:
            out.append((question, EMPTY))
        else:
            out.append((ground([], question), REFUSAL))
    if rng.random() < shape.small_talk / 2:
        passages = [prose(rng) for _ in range(rng.randint(1, 5))]
        out.append((ground(passages, stray(rng, pool)), REFUSAL))
    return out


def conversation(rng: random.Random, shape: Shape, pool: Pool = "train") -> list[Message]:
    """Return one training conversation in training phrasings."""
    out: list[Message] = []

    def say(question: str, reply: str) -> None:
        out.append(Message("user", question))
        out.append(Message("assistant", reply))

    if rng.random() < 0.1 and shape.small_talk:
        out.append(Message("system", rng.choice(SYSTEM)))
    for question, reply in opening(rng, shape, pool):
        say(question, reply)
    passages = scene(rng, shape, pool)
    last: tuple[Entity, str] | None = None
    asked: set[tuple[str, str]] = set()
    for turn in range(rng.randint(*shape.turns)):
        fresh = turn == 0 or rng.random() < shape.regroup
        lean = last is not None and rng.random() < shape.follow
        if turn and fresh:
            passages = regrouped(rng, passages, last[0] if last and lean else None, shape, pool)
        leaning = follow_up(rng, last, passages) if last and lean else None
        if leaning:
            who, relation, question = leaning
        else:
            who, relation = pick_new(rng, passages, shape, pool, asked)
            question = ask(rng, relation, who, held_out=False)
        reply = answer_from(passages, who, relation)
        if shape.refuse and rng.random() < 0.015:
            question, reply = stray(rng, pool), REFUSAL
        if fresh:
            question = ground([p.text for p in passages], question)
        say(question, reply)
        last = who, relation
        asked.add((who.name, relation))
    if rng.random() < shape.small_talk / 2:
        say(*talk(rng))
    return out
