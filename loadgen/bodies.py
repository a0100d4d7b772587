"""Request bodies, built once and sent many times, so that building them costs no CPU."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

# Each word is one token of the BERT vocabulary (a test checks that), so a text's length in tokens is known.
_WORDS = (
    "the of and in to was he is as for on with that it his by at from her she you had an were but "
    "be this are not my they one which or have him me first all also their has up who out been when "
    "after there into new two its time would no what about said we over then other so more can if "
    "like back them only some could where just during before do made school through than now years "
    "most world may between down well three year while will later city under around did such being "
    "used state people part know against your many second university both national these don known "
    "off way until re how even get head war long house water night river street light paper stone "
    "music north south garden table letter window summer winter bridge market engine signal forest"
)
WORDS = _WORDS.split()
SPECIAL_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Request:
    """One request ready to send; `items` is the number of texts or queries that throughput counts."""

    path: str
    body: bytes
    items: int


def text(tokens: int, rng: random.Random) -> str:
    """Return words of exactly `tokens` tokens for the default encoder, special tokens included."""
    return " ".join(rng.choices(WORDS, k=max(1, tokens - SPECIAL_TOKENS)))


def embed(
    texts: int,
    tokens: int,
    *,
    seed: int,
    count: int = 64,
    encoding: str = "base64",
    model: str = "",
) -> list[Request]:
    """Build `count` embedding requests of `texts` texts of `tokens` tokens each."""
    rng = random.Random(seed)
    extra = {"encoding_format": encoding} | ({"model": model} if model else {})
    bodies = ({"input": [text(tokens, rng) for _ in range(texts)], **extra} for _ in range(count))
    return [Request("/v1/embeddings", msgspec.json.encode(body), texts) for body in bodies]


def search(
    collection: str, vectors: np.ndarray[Any, Any], *, queries: int, k: int = 10, **extra: Any
) -> list[Request]:
    """Build vector searches of `queries` rows of `vectors` each, in order, encoded as by the SDK."""
    path = f"/v1/collections/{collection}/search"
    rest = {"k": k, "include_text": False, "include_metadata": False, **extra}
    found = []
    for start in range(0, len(vectors) - queries + 1, queries):
        part = np.ascontiguousarray(vectors[start : start + queries], "<f4")
        rows = [base64.b64encode(row.tobytes()).decode() for row in part]
        body = {"vector": rows[0]} if queries == 1 else {"vectors": rows}
        found.append(Request(path, msgspec.json.encode(body | rest), queries))
    return found


def search_text(
    collection: str, tokens: int, *, seed: int, count: int = 64, k: int = 10
) -> list[Request]:
    """Build searches by texts of `tokens` tokens; each needs an embedding and a search."""
    rng = random.Random(seed)
    path = f"/v1/collections/{collection}/search"
    bodies = ({"text": text(tokens, rng), "k": k} for _ in range(count))
    return [Request(path, msgspec.json.encode(body), 1) for body in bodies]
