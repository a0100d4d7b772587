"""Held-out questions: what the model is measured on. Its names and phrasings never occur in training."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from models.demo.world import relations
from models.demo.world.conversations import Message, ask, follow_up, ground
from models.demo.world.names import Pool
from models.demo.world.passages import Entity, Passage, entity, write
from models.demo.world.relations import OF_KIND, RELATIONS

ANSWER: Final = re.compile(r"The (.+?) of (.+?) is (.+) \[(\d+)\]\.")
SEED: Final = "evaluation 1"


@dataclass(frozen=True, slots=True)
class Task:
    """One question: the prompt, the whole expected answer, its value and passage (None: refuse)."""

    prompt: list[Message]
    expected: str
    value: str | None
    cite: int | None
    relation: str


@dataclass(frozen=True, slots=True)
class Score:
    """What one answer got right: the value and nothing else, its passage, every character."""

    exact: bool
    cited: bool
    whole: bool


def score(task: Task, said: str) -> Score:
    """Compare an answer to its task. Where nothing is stated, exact and cited mean: it refuses."""
    whole = said == task.expected
    if task.value is None:
        refuses = relations.refuses(said)
        return Score(refuses, refuses, whole)
    parts = ANSWER.fullmatch(said)
    if not parts:
        return Score(exact=False, cited=False, whole=False)
    return Score(parts[3] == task.value, int(parts[4]) == task.cite, whole)


def _task(
    prompt: list[Message], expected: str, who: Entity, relation: str, cite: int | None
) -> Task:
    value = who.facts[relation] if cite is not None else None
    return Task(prompt, expected, value, cite, relation)


def _page(rng: random.Random, who: Entity, stated: list[str]) -> Passage:
    """Half of the passages state their facts in ways that training never uses."""
    return write(rng, who, stated, page=rng.random() < 0.7, held_out=rng.random() < 0.5)


def _some(rng: random.Random, keys: list[str], most: int = 3) -> list[str]:
    """Return a random non-empty choice of up to `most` of `keys`, in random order."""
    return rng.sample(keys, rng.randint(1, min(most, len(keys))))


def related(
    rng: random.Random, who: Entity, relation: str, count: int, pool: Pool, *, same: bool = True
) -> list[Passage]:
    """Return distractors: of `who` with other relations (where `same`), or of others with `relation`."""
    others = [k for k in OF_KIND[who.kind] if k != relation]
    rng.shuffle(others)
    out = []
    for _ in range(count):
        if same and others and rng.random() < 0.35:
            cut = rng.randint(1, len(others))
            out.append(_page(rng, who, others[:cut]))
            others = others[cut:]
        else:
            other = entity(rng, who.kind, pool)
            rest = [k for k in OF_KIND[who.kind] if k != relation]
            keys = [relation, *rng.sample(rest, rng.randint(0, 2))]
            rng.shuffle(keys)
            out.append(_page(rng, other, keys))
    return out


def _placed(
    rng: random.Random, index: int, count: int, pool: Pool
) -> tuple[list[Passage], Entity, str, int]:
    """Return passages, and the entity, relation and 1-based place of the one that answers.

    The place runs through 1..count as `index` rises, so it is exactly uniform.
    """
    relation = list(RELATIONS)[index // count % len(RELATIONS)]
    who = entity(rng, RELATIONS[relation].kind, pool)
    passages = related(rng, who, relation, count - 1, pool)
    used = {k for p in passages if p.entity is who for k in p.stated}
    free = [k for k in OF_KIND[who.kind] if k != relation and k not in used]
    keys = [relation, *rng.sample(free, rng.randint(0, min(2, len(free))))]
    rng.shuffle(keys)
    place = index % count + 1
    passages.insert(place - 1, _page(rng, who, keys))
    return passages, who, relation, place


def _said(who: Entity, relation: str, place: int) -> str:
    return relations.answer(RELATIONS[relation], who.name, who.facts[relation], place)


def _missing(who: Entity, relation: str) -> str:
    return relations.missing(RELATIONS[relation], who.name)


def _grounded(passages: list[Passage], question: str) -> Message:
    return Message("user", ground([p.text for p in passages], question))


def present(index: int, count: int = 5, pool: Pool = "evaluation") -> Task:
    """Return question `index` of those that one of `count` passages answers."""
    rng = random.Random(f"{SEED} present {count} {index}")
    passages, who, relation, place = _placed(rng, index, count, pool)
    prompt = [_grounded(passages, ask(rng, relation, who, held_out=True))]
    return _task(prompt, _said(who, relation, place), who, relation, place)


def absent(index: int, count: int = 5, pool: Pool = "evaluation") -> Task:
    """Return question `index` that no passage answers: relation missing (even) or entity (odd)."""
    rng = random.Random(f"{SEED} absent {index}")
    relation = list(RELATIONS)[index // 2 % len(RELATIONS)]
    who = entity(rng, RELATIONS[relation].kind, pool)
    passages = related(rng, who, relation, count - 1, pool, same=False)
    if index % 2 == 0:
        others = [k for k in OF_KIND[who.kind] if k != relation]
        passages.append(_page(rng, who, _some(rng, others)))
    else:
        passages += related(rng, who, relation, 1, pool, same=False)
    rng.shuffle(passages)
    prompt = [_grounded(passages, ask(rng, relation, who, held_out=True))]
    return _task(prompt, _missing(who, relation), who, relation, None)


def turn(index: int, number: int, pool: Pool = "evaluation") -> Task:
    """Return a question asked as turn `number` (2 or 3), after right answers in the turns before.

    A third of such turns lean on the one before ("And its mayor?", "What about ...?"), a third ask anew
    about the passages given, a third bring new passages.
    """
    rng = random.Random(f"{SEED} turn {number} {index}")
    passages, who, relation, place = _placed(rng, index, 5, pool)
    prompt = [_grounded(passages, ask(rng, relation, who, held_out=True))]
    expected: str = _said(who, relation, place)
    cite: int | None = place
    for at in range(2, number + 1):
        prompt.append(Message("assistant", expected))
        way = (index + at) % 3
        lean = follow_up(rng, (who, relation), passages) if way == 0 else None
        if lean:
            who, relation, question = lean
            prompt.append(Message("user", question))
        elif way == 2:
            passages, who, relation, _ = _placed(rng, rng.randrange(10**6), 5, pool)
            prompt.append(_grounded(passages, ask(rng, relation, who, held_out=True)))
        else:
            chosen = rng.choice(passages)
            who, relation = chosen.entity, rng.choice(sorted(chosen.stated))
            prompt.append(Message("user", ask(rng, relation, who, held_out=True)))
        cite = next(
            (n for n, p in enumerate(passages, 1) if p.entity is who and relation in p.stated), None
        )
        expected = _said(who, relation, cite) if cite is not None else _missing(who, relation)
    return _task(prompt, expected, who, relation, cite)


def long(index: int, tokens: int, length: Callable[[str], int], pool: Pool = "evaluation") -> Task:
    """Return a question with as many passages as fit into a prompt of `tokens` (less 40 to answer)."""
    rng = random.Random(f"{SEED} long {tokens} {index}")
    relation = list(RELATIONS)[index % len(RELATIONS)]
    who = entity(rng, RELATIONS[relation].kind, pool)
    passages = related(rng, who, relation, 4, pool)
    target = _page(rng, who, [relation])
    room = tokens - 80 - sum(length(p.text) + 8 for p in [*passages, target])
    while room > 0:
        kind = rng.choice(list(OF_KIND))
        other = entity(rng, kind, pool)
        extra = _page(rng, other, _some(rng, list(OF_KIND[kind])))
        room -= length(extra.text) + 8
        if room > 0:
            passages.append(extra)
    rng.shuffle(passages)
    place = rng.randint(1, len(passages) + 1)
    passages.insert(place - 1, target)
    prompt = [_grounded(passages, ask(rng, relation, who, held_out=True))]
    return _task(prompt, _said(who, relation, place), who, relation, place)


def suite(count: int, length: Callable[[str], int]) -> Iterator[tuple[str, list[Task]]]:
    """Yield (name, tasks) of every set: `count` questions each, a tenth of that for long prompts."""
    yield "present", [present(i) for i in range(count)]
    yield "absent", [absent(i) for i in range(count)]
    yield "turn 2", [turn(i, 2) for i in range(count)]
    yield "turn 3", [turn(i, 3) for i in range(count)]
    for tokens in (1024, 2048, 4096):
        yield f"{tokens} tokens", [long(i, tokens, length) for i in range(max(1, count // 10))]
