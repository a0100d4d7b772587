# ruff: noqa: SIM905 - lists of syllables are easier to read as text
"""Invented names, in pools that share none: what is trained on can never be evaluated on."""

from __future__ import annotations

import hashlib
import random
from typing import Final, Literal

Pool = Literal["train", "evaluation", "handbook"]

ONSETS: Final = (
    "b br c ch d dr f fl g gr h j k kr l m n p pr qu r s sh sk st t th tr v w y z".split()
)
VOWELS: Final = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ae", "ei", "ou", "au"]
CODAS: Final = ["", "", "", *["n", "r", "l", "s", "m", "nd", "rk", "th", "t", "k", "x", "ll"]]
PLACE_ENDS: Final = (
    "a ia en or is um eth holm by ford wick mere dal ona ora ava essa stad vik ton".split()
)
GIVEN_ENDS: Final = "a an el in is o us e ira ena ard win ette ian ys".split()
FAMILY_ENDS: Final = "er en ov ski son ard ell ini ez man is ow ock ing ault".split()
SHIP_ENDS: Final = "ara ius ena ion ella ix os une iva ador ess ana".split()


def pool_of(name: str) -> Pool:
    """Return the pool that owns `name`: a function of its letters alone, so pools never overlap."""
    bucket = hashlib.blake2b(name.lower().encode(), digest_size=2).digest()[0] % 8
    return "evaluation" if bucket == 0 else "handbook" if bucket == 1 else "train"


def _syllable(rng: random.Random) -> str:
    return rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)


def _stem(rng: random.Random) -> str:
    return "".join(_syllable(rng) for _ in range(rng.choice((1, 1, 1, 2))))


def word(rng: random.Random, pool: Pool, ends: list[str]) -> str:
    """Return one capitalised name of 4 to 11 letters that `pool` owns."""
    while True:
        stem = _stem(rng)
        end = rng.choice(ends)
        if stem[-1] in "aeiou" and end[0] in "aeiou":
            stem += rng.choice("lnrstvdm")
        name = (stem + end).capitalize()
        if 4 <= len(name) <= 11 and pool_of(name) == pool:
            return name


def place(rng: random.Random, pool: Pool) -> str:
    """Return the name of a town or a river."""
    return word(rng, pool, PLACE_ENDS)


def person(rng: random.Random, pool: Pool) -> str:
    """Return a given and a family name, both owned by `pool`."""
    return f"{word(rng, pool, GIVEN_ENDS)} {word(rng, pool, FAMILY_ENDS)}"


def guild(rng: random.Random, pool: Pool) -> str:
    """Return the name of a company: an invented word and a kind of company."""
    kind = rng.choice(("Guild", "Works", "Company", "House", "Brothers", "Union"))
    return f"{word(rng, pool, FAMILY_ENDS)} {kind}"


def ship(rng: random.Random, pool: Pool) -> str:
    """Return the name of a ship."""
    return word(rng, pool, SHIP_ENDS)
