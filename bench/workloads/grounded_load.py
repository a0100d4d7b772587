"""Grounded chats as a load: a model that takes some time for its prompts, a collection, and questions about it."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from spillway_client import AsyncSpillway

from bench.gpu import shapes
from bench.mesh.processes import DEMO
from loadgen import bodies
from loadgen.chat.load import Asking
from loadgen.chat.scripts import Say, Script

COLLECTION = "planned"
PASSAGES = 2  # of each answer
PASSAGE_WORDS, QUESTION_WORDS = 32, 8
ANSWER_TOKENS = 16
DOCUMENTS, QUICK_DOCUMENTS = 400, 40
_PART = 100
# About 42 million parameters under the shipped model's vocabulary: a prompt takes tenths of a second.
_SHAPE = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "head_dim": 64,
}
_TEXTS = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def write_model(directory: Path) -> Path:
    """Write the model with random weights and the shipped model's tokenizer and template; return its directory."""
    config = msgspec.json.decode((DEMO / "config.json").read_bytes())
    config.pop("spillway", None)
    shapes.write(directory, config | _SHAPE, "cpu")
    for name in _TEXTS:
        shutil.copy(DEMO / name, directory)
    return directory


def asking() -> Asking:
    """Return how each question is asked: from the passages, with an answer of a fixed length, drawn."""
    retrieval: dict[str, Any] = {"collection": COLLECTION, "k": PASSAGES}
    return Asking(how="stateless", temperature=1.0, retrieval=retrieval)


def questions(seed: int, tokens: int = ANSWER_TOKENS) -> Iterator[Script]:
    """Yield single questions for ever, each to be answered with so many tokens."""
    draw = random.Random(seed)
    for number in itertools.count(1):
        text = " ".join(draw.choices(bodies.WORDS, k=QUESTION_WORDS))
        yield Script(number, (Say(text, tokens),))


async def fill(url: str, documents: int, seed: int = 1) -> None:
    """Make the collection and store so many documents in it: few enough to be compared one by one, without an index."""
    draw = random.Random(seed)
    async with AsyncSpillway(url, timeout_s=300, max_retries=10) as client:
        await client.collections.create(COLLECTION)
        for start in range(0, documents, _PART):
            part = [
                {
                    "id": f"d{start + each}",
                    "text": " ".join(draw.choices(bodies.WORDS, k=PASSAGE_WORDS)),
                }
                for each in range(min(_PART, documents - start))
            ]
            await client.documents(COLLECTION).add(part)
