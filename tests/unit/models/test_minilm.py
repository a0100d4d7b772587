"""The default model: its file, its known similarities, sentence-transformers' vectors, and the accuracy bound."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.models.encoders.encoder import Encoder
from engine.models.encoders.files import find
from engine.models.encoders.precision import EncoderPrecision
from tests.support import encoder_models

KNOWN = ("The cat sat on the mat.", "A kitten rests on a rug.", "The bond market fell today.")


@pytest.fixture(scope="module")
def exact() -> Encoder:
    """Return MiniLM in fp32."""
    return Encoder.load("", dtype="fp32")


@pytest.fixture(scope="module")
def tokenizer(exact: Encoder) -> Tokenizer:
    """Return its tokenizer as the router gets it."""
    return Tokenizer.from_str(exact.tokenizer_json().decode())


def _documents() -> list[str]:
    modules = (ast, inspect, json, textwrap, argparse_module())
    found = [inspect.getdoc(value) for module in modules for value in vars(module).values()]
    return [text for text in dict.fromkeys(found) if text and len(text) > 20][:40]


def argparse_module() -> object:
    """Return a module with many real docstrings."""
    import argparse

    return argparse


def test_known_similarities(exact: Encoder, tokenizer: Tokenizer) -> None:
    """Near sentences are near and far ones far, by the values these weights are known to give."""
    vectors = exact.encode([item.ids for item in tokenizer.encode_batch(list(KNOWN))])

    assert float(vectors[0] @ vectors[1]) == pytest.approx(0.6216, abs=2e-3)
    assert float(vectors[0] @ vectors[2]) == pytest.approx(0.0318, abs=2e-3)


def test_equals_sentence_transformers(exact: Encoder, tokenizer: Tokenizer) -> None:
    """Texts get sentence-transformers' vectors, tokenizing included."""
    from sentence_transformers import SentenceTransformer

    oracle = SentenceTransformer(str(find("").directory), device="cpu")
    texts = [*KNOWN, "Grüße aus Köln, naïve café", "x", *_documents()[:5]]
    ids = [item.ids for item in tokenizer.encode_batch(texts)]
    short = [index for index, item in enumerate(ids) if len(item) <= exact.max_tokens]

    expected = oracle.encode([texts[index] for index in short])

    actual = exact.encode([ids[index] for index in short])
    assert np.abs(actual - expected).max() <= 1e-5


def test_chosen_precision_is_within_the_bound(exact: Encoder, tokenizer: Tokenizer) -> None:
    """What `auto` chooses has cosine >= 0.9995 to fp32 for every real text, >= 0.9999 in the median."""
    fast = Encoder.load("", dtype="auto")
    ids = [item.ids[: exact.max_tokens] for item in tokenizer.encode_batch(_documents())]

    cosine = (exact.encode(ids) * fast.encode(ids)).sum(axis=1)

    assert cosine.min() >= 0.9995
    assert np.median(cosine) >= 0.9999


def test_precision_is_remembered(tmp_path: Path) -> None:
    """The measurement is made once for a machine and found again; a damaged cache costs only time."""
    encoder_models.save(tmp_path, "bert")
    cache = tmp_path / "cache" / "precision.json"
    first = Encoder.load(str(tmp_path), dtype="auto", cache=cache).dtype
    remembered = json.loads(cache.read_text())
    cache.write_text(json.dumps(dict.fromkeys(remembered, "fp32")))

    assert list(remembered.values()) == [first]
    assert Encoder.load(str(tmp_path), dtype="auto", cache=cache).dtype == "fp32"
    cache.write_text("{broken")
    assert Encoder.load(str(tmp_path), dtype="auto", cache=cache).dtype in get_args(
        EncoderPrecision
    )


def test_card(exact: Encoder) -> None:
    """The card carries what the router needs; aliases name the same model."""
    card = exact.card(created_ms=5)

    assert (card.name, card.family, card.kind) == ("minilm", "embed.minilm", "embed")
    assert (card.dimension, card.max_tokens, card.created_ms) == (384, 256, 5)
    assert find("all-MiniLM-L6-v2").fingerprint() == exact.fingerprint
