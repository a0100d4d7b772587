"""What is said besides questions about the world: greetings, and questions about something else altogether."""

from __future__ import annotations

import random
from typing import Final

from models.demo.world import names, words
from models.demo.world.names import Pool

GREETING: Final = "Hello. Give me passages and a question, and I will answer from them."
IDENTITY: Final = "I am a small model that answers questions from given passages."
THANKS: Final = "You are welcome."
EMPTY: Final = "I answer from passages. Please give me some with your question."
SMALL_TALK: Final[dict[str, tuple[str, ...]]] = {
    GREETING: (
        "Hello",
        "Hello!",
        "Hi",
        "Hi there",
        "Hey",
        "Good morning",
        "Good evening",
        "Greetings",
        "hello",
        "hi",
        "Hi, how are you?",
        "Good day to you",
        "Hello there!",
        "hey there",
        "How are you?",
    ),
    IDENTITY: (
        "Who are you?",
        "What are you?",
        "What can you do?",
        "who are you",
        "Tell me about yourself.",
        "What is your name?",
        "Are you a person?",
        "How do you work?",
        "What do you do?",
        "Help",
        "What can I ask you?",
        "Introduce yourself.",
        "Are you a robot?",
        "Can you help me?",
    ),
    THANKS: (
        "Thanks",
        "Thank you",
        "Thank you!",
        "thanks",
        "Thanks a lot",
        "Great, thanks",
        "Thank you very much.",
        "Thanks for your help",
        "Many thanks",
        "Good, thank you",
        "Goodbye",
        "Bye",
        "That is all, thanks.",
    ),
}
STRAY: Final = (
    "What is the {a} of {b}?", "How do I {a} the {b}?", "Where is the {a} {b} in {n}?", "Who {a} the {b}?",
    "{a} for several {b} at once", "What does {a} {b} do?", "Why is the {a} {b} in {n}?",
    "When did {n} {a} the {b}?", "Is {a} a {b}?", "Explain {a} and {b}.", "Which {a} is the {b} of {n}?",
    "How many {b} are in {n}?", "Can {a} {b} be {c}?", "the {a} {b} with {c}", "What is the {a} {b} in {n}?",
)  # fmt: skip


def stray(rng: random.Random, pool: Pool) -> str:
    """Return a question about something else altogether: no passage says anything about it."""
    a, b, c = rng.choices(words.PLAIN, k=3)
    text = rng.choice(STRAY).replace("{a}", a).replace("{b}", b).replace("{c}", c)
    text = text.replace("{n}", names.place(rng, pool))
    return text[0].upper() + text[1:] if rng.random() < 0.7 else text


def prose(rng: random.Random) -> str:
    """Return a passage of plain words about nothing in the world."""
    lines = (
        " ".join(rng.choices(words.PLAIN, k=rng.randint(4, 14))) for _ in range(rng.randint(1, 5))
    )
    return " ".join(f"{line[0].upper()}{line[1:]}." for line in lines)


def talk(rng: random.Random) -> tuple[str, str]:
    """Return a remark that needs no passages, and its reply."""
    reply = rng.choice(tuple(SMALL_TALK))
    return rng.choice(SMALL_TALK[reply]), reply
