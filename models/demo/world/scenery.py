"""What passages say besides facts: how a page opens, and sentences that answer nothing."""

from __future__ import annotations

from typing import Final

# The last opening of each list is held out. {e} the entity.
OPENINGS: Final[dict[str, tuple[str, ...]]] = {
    "town": (
        "{e} is a town in the north.",
        "{e} is a small town.",
        "{e} is a market town in the hills.",
        "{e} is an old walled town.",
        "{e} is a town by the sea.",
        "{e} is a quiet town in a valley.",
    ),
    "person": (
        "{e} is well known in the region.",
        "{e} lives by the sea.",
        "{e} is loved by the neighbours.",
        "{e} lives in a tall house.",
        "{e} has travelled widely.",
        "{e} is a person of few words.",
    ),
    "guild": (
        "{e} is an old company.",
        "{e} employs forty people.",
        "{e} is a family business.",
        "{e} is a company of good name.",
        "{e} is a company with a long history.",
        "{e} is a firm with two workshops.",
    ),
    "ship": (
        "{e} is a ship with three masts.",
        "{e} is a sailing ship.",
        "{e} is a fast ship.",
        "{e} is a large ship with a red hull.",
        "{e} is a ship of the northern fleet.",
        "{e} is a wooden ship.",
    ),
}
FILLERS: Final[dict[str, tuple[str, ...]]] = {
    "town": (
        "The streets are narrow.",
        "Winters are long here.",
        "There is a market on Fridays.",
        "Many visitors come in summer.",
        "A stone wall surrounds the houses.",
        "The bells ring at noon.",
    ),
    "person": (
        "Many letters have survived.",
        "The house has a green door.",
        "Visitors are always welcome.",
        "A portrait hangs in the hall.",
        "Long walks are a daily habit.",
        "The family is large.",
    ),
    "guild": (
        "Orders come from far away.",
        "The workshops open at dawn.",
        "Apprentices stay for six years.",
        "The books are kept with care.",
        "Prices have hardly changed.",
        "Trade is good.",
    ),
    "ship": (
        "The sails are white.",
        "Storms have never harmed it.",
        "The hull was painted last year.",
        "Twenty sailors work on board.",
        "The voyage takes three weeks.",
        "A bell hangs at the bow.",
    ),
}
