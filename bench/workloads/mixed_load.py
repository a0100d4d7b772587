"""The product's own load: chat, embeddings, search and ingest at once in an open loop, with an objective for each.

Objectives and shape were fixed before anything was measured with them. Whoever changes one measures both sides anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

CHAT, EMBED, SEARCH, INGEST = "chat", "embeddings", "search", "ingest"
KINDS = (CHAT, EMBED, SEARCH, INGEST)


@dataclass(frozen=True, slots=True)
class Objectives:
    """The most seconds from when a request was due: to a chat's first token, to vectors, to hits, to stored documents.

    `token_s` is the mean time of a chat's later tokens. Ingest runs behind the rest, but must keep up.
    """

    first_s: float = 1.0
    token_s: float = 0.1
    embed_s: float = 1.0
    search_s: float = 0.2
    ingest_s: float = 10.0


@dataclass(frozen=True, slots=True)
class MixShape:
    """What arrives at a load factor of 1: requests a second of each kind, and their sizes.

    Chat, embeddings and search arrive as Poisson processes of their own, ingest steadily. A chat is a prompt of random
    tokens that no server has seen, with a length drawn evenly, greedy; so is the number of its new tokens. A text is a
    piece of a docstring of Python's standard library: at most 160 characters, some 35 tokens. A search embeds one text
    and finds the `k` nearest of `rows` stored pieces, with their texts. An ingest stores `documents` new ones.
    """

    per_s: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({CHAT: 0.5, EMBED: 2.0, SEARCH: 10.0, INGEST: 1.0})
    )
    prompt_tokens: tuple[int, int] = (64, 256)
    new_tokens: tuple[int, int] = (32, 96)
    texts: int = 16
    k: int = 10
    rows: int = 10_000
    documents: int = 8


OBJECTIVES, SHAPE = Objectives(), MixShape()
