"""Encoders of all families against transformers, in every pooling, packing and precision."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from engine.encoder.pooling import pool
from engine.kernels.encoder import EncoderKernels
from engine.models.encoders import torch_forward
from engine.models.encoders.encoder import Encoder
from engine.models.encoders.files import find
from engine.models.encoders.packed_forward import PackedForward
from engine.models.encoders.parts import PART_TOKENS, parts_of, split
from engine.models.encoders.spec import Pooling
from engine.models.encoders.torch_forward import TorchForward
from engine.models.encoders.weights import load_weights
from tests.support import encoder_models

FAMILIES = pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
ALL = pytest.mark.parametrize("family", encoder_models.FAMILIES)


def relative(actual: Any, expected: Any) -> float:
    """Return the largest difference over the largest magnitude."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@ALL
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_hidden_states_equal_transformers(family: str, activation: str, tmp_path: Path) -> None:
    """Mean-pooled fp32 vectors equal transformers' to 1e-4 relative, for every activation we serve."""
    oracle = encoder_models.save(tmp_path, family, hidden_act=activation)
    encoder = Encoder.load(str(tmp_path), dtype="fp32")
    texts = encoder_models.texts()

    expected = np.stack([encoder_models.hidden(oracle, text).mean(0).numpy() for text in texts])

    assert relative(encoder.encode(texts), expected) <= 1e-4


@FAMILIES
def test_pooling_and_normalisation(family: str, tmp_path: Path) -> None:
    """cls, max and mean pooling and normalisation are what sentence-transformers' files say."""
    oracle = encoder_models.save(tmp_path, family)
    texts = encoder_models.texts()
    states = [encoder_models.hidden(oracle, text).numpy() for text in texts]
    ways = {
        "pooling_mode_cls_token": [rows[0] for rows in states],
        "pooling_mode_max_tokens": [rows.max(0) for rows in states],
        "pooling_mode_mean_tokens": [rows.mean(0) for rows in states],
    }
    for flag, rows in ways.items():
        encoder_models.pooled(tmp_path, normalise=True, **{flag: True})
        expected = np.stack(rows) / np.linalg.norm(rows, axis=1, keepdims=True)

        assert relative(Encoder.load(str(tmp_path), dtype="fp32").encode(texts), expected) <= 1e-4


@ALL
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packing_changes_nothing(family: str, dtype: str, tmp_path: Path) -> None:
    """A text's vector does not depend on the texts it is packed with, nor on their order."""
    encoder_models.save(tmp_path, family)
    encoder = Encoder.load(str(tmp_path), dtype=dtype)
    texts = encoder_models.texts(12)

    alone = np.concatenate([encoder.encode([text]) for text in texts])

    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    assert relative(encoder.encode(texts), alone) <= tolerance
    assert relative(encoder.encode(texts[::-1])[::-1], alone) <= tolerance


def test_bf16_kernels_equal_torch(tmp_path: Path) -> None:
    """Our kernels give what torch gives in bf16, to bf16's own rounding."""
    kernels = EncoderKernels.load()
    if kernels is None:
        pytest.skip("no AVX512-BF16 or no compiler here")
    for heads in (1, 2):  # heads of 64 and of 32
        encoder_models.save(tmp_path, "bert", num_attention_heads=heads)
        files = find(str(tmp_path))
        weights = load_weights(files)
        texts = sorted(encoder_models.texts(9), key=len)
        types = [[number % 2 for number in range(len(text))] for text in texts]
        with torch.inference_mode():
            exact = TorchForward(files.spec, weights, "fp32", torch.device("cpu")).rows(
                texts, types
            )
            packed = PackedForward(files.spec, weights, kernels, 2).rows(texts, types)
            plain = TorchForward(files.spec, weights, "bf16", torch.device("cpu")).rows(
                texts, types
            )

        assert relative(packed, exact) <= max(2e-2, 2 * relative(plain, exact))


def test_bf16_where_onednn_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without bf16 in oneDNN (no AVX-512) computes bf16 unpacked, to bf16's own rounding."""
    monkeypatch.setattr(torch_forward, "packs_bf16", lambda: False)
    encoder_models.save(tmp_path, "bert")
    files, texts = find(str(tmp_path)), sorted(encoder_models.texts(9), key=len)
    weights, types = load_weights(files), [[0] * len(text) for text in texts]
    with torch.inference_mode():
        exact, rounded = (
            TorchForward(files.spec, weights, precision, torch.device("cpu")).rows(texts, types)
            for precision in ("fp32", "bf16")
        )

    rounded = rounded.float()
    assert not torch.equal(rounded, exact)
    assert torch.nn.functional.cosine_similarity(rounded, exact).min() >= 0.995


@given(st.lists(st.integers(1, 512), min_size=1, max_size=60), st.integers(1, 12))
def test_parts_of_a_batch(lengths: list[int], count: int) -> None:
    """Parts are the batch in order, and differ from equal shares by no more than a text."""
    parts = [lengths[part] for part in split(lengths, count)]

    assert list(chain.from_iterable(parts)) == lengths
    assert len(parts) <= count
    assert all(parts)
    assert max(map(sum, parts)) < sum(lengths) / count + max(lengths) + 1


@given(
    st.lists(st.integers(1, 512), min_size=1, max_size=60), st.integers(1, 12), st.floats(0, 100)
)
def test_parts_that_are_chosen(lengths: list[int], threads: int, waits: float) -> None:
    """The chosen parts are the batch in order; none are chosen only if no part or thread could end in time."""
    parts = [lengths[part] for part in parts_of(lengths, threads, waits)]
    share = sum(lengths) / threads

    assert not parts or list(chain.from_iterable(parts)) == lengths
    if threads == 1:
        assert parts == [lengths]
    if max(lengths) > 1.2 * share + waits:
        assert not parts
    if sum(lengths) <= 1.2 * share + waits or 2 * max(lengths) <= 0.2 * share + waits:
        assert parts


def test_parts_of_a_few_texts() -> None:
    """On two threads one computes a short text, each one of two texts, and both share a long text among short ones."""
    assert parts_of([16], 2, 56) == [slice(0, 1)]
    assert parts_of([128], 2, 56) == [slice(0, 1)]
    assert parts_of([256], 2, 56) == []
    assert parts_of([16, 16], 2, 56) == [slice(0, 1), slice(1, 2)]
    assert parts_of([400, 16, 16], 2, 56) == []
    assert len(parts_of([128] * 19, 2, 56)) == 4
    assert parts_of([8192], 2, 56) == []


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("normalise", [False, True])
def test_compiled_pooling_equals_torch(pooling: Pooling, *, normalise: bool) -> None:
    """The compiled pooling gives torch's bits, texts of one token among them; what is no number stays none."""
    kernels = EncoderKernels.load()
    if kernels is None:
        pytest.skip("no AVX512-BF16 or no compiler here")
    lengths = [1, 7, 128, 1, 33]
    rows = torch.randn(sum(lengths), 48, generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, *accumulate(lengths)])
    out = torch.empty(len(lengths), 48)
    kernels.pool(rows, starts, pooling, normalise=normalise, out=out)

    assert torch.equal(out, pool(rows, lengths, pooling, normalise=normalise))
    for row in (0, 1, 3, 7):  # the first rows of two texts, one within, the last of the second
        rows[row, 5] = math.nan
    kernels.pool(rows, starts, "max", normalise=False, out=out)
    assert out[:, 5].isnan().tolist() == [True, True, False, False, False]


def test_parts_give_what_the_whole_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are computed in parts, each by one thread, with token types, to bf16's rounding the same."""
    kernels = EncoderKernels.load()
    if kernels is None:
        pytest.skip("no AVX512-BF16 or no compiler here")
    encoder_models.save(tmp_path, "bert")
    files = find(str(tmp_path))
    weights = load_weights(files)
    texts = [text for _ in range(8) for text in encoder_models.texts(12)]
    types = [[number % 2 for number in range(len(text))] for text in texts]
    parted = PackedForward(files.spec, weights, kernels, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    taken: list[tuple[int, int]] = []
    forward = parted._forward

    def noted(some: Any, kinds: Any) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append((len(some), torch.get_num_threads()))
        return forward(some, kinds)

    with torch.inference_mode():
        lengths = [len(text) for text in texts]
        whole = pool(parted.rows(texts, types), lengths, "mean", normalise=True)
        monkeypatch.setattr(parted, "_forward", noted)
        for count in (len(texts), 12, 1):
            taken.clear()
            found = parted.pooled(texts[:count], types[:count], "mean", normalise=True)
            rounds = max(1, sum(lengths[:count]) // PART_TOKENS // 2)
            assert relative(found, whole[:count]) <= 1e-2
            assert len(taken) == min(count, 2 * rounds)
            assert sum(texts for texts, _ in taken) == count
            assert {threads for _, threads in taken} == {1}
            assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@FAMILIES
def test_cross_encoder_equals_transformers(family: str, tmp_path: Path) -> None:
    """Scores of pairs equal transformers' sequence classification to 1e-4 relative."""
    oracle = encoder_models.save(tmp_path, family, labels=1)
    encoder = Encoder.load(str(tmp_path), dtype="fp32")
    pairs = encoder_models.texts()
    types = [[0] * (len(pair) // 2) + [1] * (len(pair) - len(pair) // 2) for pair in pairs]
    if family == "xlm-roberta":
        types = [[0] * len(pair) for pair in pairs]
    with torch.inference_mode():
        expected = [
            oracle(input_ids=torch.tensor([pair]), token_type_ids=torch.tensor([kind])).logits[0, 0]
            for pair, kind in zip(pairs, types, strict=True)
        ]

    assert encoder.reranks
    assert encoder.card().kind == "rerank"
    assert relative(encoder.score(pairs, types), torch.stack(expected)) <= 1e-4


def test_texts_it_cannot_take_are_refused(tmp_path: Path) -> None:
    """An empty text, one too long, and a token outside the vocabulary are named by their index."""
    encoder_models.save(tmp_path, "bert")
    encoder = Encoder.load(str(tmp_path), dtype="fp32")
    encoder.check([[1], [2] * 64])
    for text in ([], [2] * 65, [encoder_models.VOCABULARY], [-1]):
        with pytest.raises(InvalidRequest, match="text 1"):
            encoder.check([[3], text])


def test_fingerprint_follows_what_changes_vectors(tmp_path: Path) -> None:
    """Weights and pooling change the fingerprint; dtype does not."""
    encoder_models.save(tmp_path, "bert")
    first = Encoder.load(str(tmp_path), dtype="fp32").fingerprint
    same = Encoder.load(str(tmp_path), dtype="bf16").fingerprint
    encoder_models.pooled(tmp_path, normalise=True, pooling_mode_cls_token=True)
    pooled = Encoder.load(str(tmp_path), dtype="fp32").fingerprint
    encoder_models.save(tmp_path, "bert", initializer_range=0.4)
    weights = Encoder.load(str(tmp_path), dtype="fp32").fingerprint

    assert first == same
    assert len({first, pooled, weights}) == 3


def test_a_second_thread_computes_beside_the_first(tmp_path: Path) -> None:
    """Two threads compute at once with the same weights; each gets its vectors, the second one on one core."""
    encoder_models.save(tmp_path, "bert")
    encoder = Encoder.load(str(tmp_path), threads=2)
    beside = encoder.beside()
    assert beside is not None
    texts = encoder_models.texts()
    expected = encoder.encode(texts)

    def second(_: int) -> float:
        worst = max(
            relative(beside.encode([text]), row) for text, row in zip(texts, expected, strict=True)
        )
        assert torch.get_num_threads() == 1
        return worst

    with ThreadPoolExecutor(1) as pool_of_one:
        found = pool_of_one.map(second, range(20))
        assert all(relative(encoder.encode(texts), expected) <= 1e-6 for _ in range(20))
        assert max(found) <= 2e-2
    assert torch.get_num_threads() == 2
