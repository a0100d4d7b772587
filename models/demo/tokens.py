"""The tokenizer and the chat template: text of the world to token ids and back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.demo.world.conversations import Message, Shape, conversation

DIRECTORY: Final = Path(__file__).parent
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES: Final = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL: Final = (PAD, BEGIN, END, *ROLES.values())
VOCABULARY: Final = 1536
SEED: Final = "tokenizer"


def build(conversations: int = 6000) -> Tokenizer:
    """Train a byte-level BPE on conversations of the training pool; digits stay single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    shape = Shape((3, 5), (1, 3), (3, 6), page=0.5, small_talk=0.1, regroup=0.1)
    rng = random.Random(SEED)
    texts = (m.content for _ in range(conversations) for m in conversation(rng, shape))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Encoder:
    """Turns conversations into ids, as the chat template renders them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        known: dict[str, int] = tokenizer.get_vocab()
        self.special = {t: known[t] for t in SPECIAL}

    @classmethod
    def load(cls, directory: Path = DIRECTORY) -> Encoder:
        """Return the encoder of the tokenizer in `directory`."""
        return cls(Tokenizer.from_file(str(directory / "tokenizer.json")))

    def text(self, text: str) -> list[int]:
        """Return the ids of plain text; nothing in it becomes a special token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def conversation(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Return ids, and for each whether the model says it (answers and their end tokens)."""
        ids, said = [self.special[BEGIN]], [False]
        encoded = self.tokenizer.encode_batch(
            [m.content for m in messages], add_special_tokens=False
        )
        for message, part in zip(messages, encoded, strict=True):
            ids += [self.special[ROLES[message.role]], *part.ids, self.special[END]]
            said += [False, *[message.role == "assistant"] * (len(part.ids) + 1)]
        return ids, said

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return the ids of a conversation that ends where the model is to answer."""
        return [*self.conversation(messages)[0], self.special[ROLES["assistant"]]]
