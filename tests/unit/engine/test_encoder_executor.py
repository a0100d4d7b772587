"""The encoder's executor as a library: values per job, the guilty found, nothing raised, no lease known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.encoder.executor import EncodeFailure, EncoderInput, Scores, run_batch
from tests.support.fake_encoders import NAN, POISON, TinyModel

TEXT = st.lists(st.integers(1, 9) | st.sampled_from([POISON, NAN]), min_size=1, max_size=3)


class TinyReranker(TinyModel):
    """A cross-encoder whose raw score is a pair's sum, less the sum of its token types."""

    @property
    def reranks(self) -> bool:
        return True

    def score(self, pairs: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> np.ndarray:
        kinds = types or [[0] * len(pair) for pair in pairs]
        assert [len(pair) for pair in pairs] == [len(kind) for kind in kinds]
        return np.array(
            [sum(pair) - sum(kind) for pair, kind in zip(pairs, kinds, strict=True)], np.float32
        )


@given(st.lists(st.lists(TEXT, min_size=1, max_size=3), min_size=1, max_size=6))
def test_only_the_guilty_fail(jobs: list[list[list[int]]]) -> None:
    """A job fails if and only if its own texts fail; every other job gets its own vectors, in order."""
    model = TinyModel()
    ran = run_batch(model, [EncoderInput(texts, [], scores=False) for texts in jobs])
    guilty = [any(POISON in text or NAN in text for text in texts) for texts in jobs]

    assert ran.isolated == (len(jobs) > 1 and any(guilty))
    for texts, outcome, fails in zip(jobs, ran.outcomes, guilty, strict=True):
        assert isinstance(outcome, EncodeFailure) == fails
        if isinstance(outcome, np.ndarray):
            assert outcome.tolist() == [model.row(text) for text in texts]


def test_failures_are_explained() -> None:
    """A raised error keeps its kind, message and trace for the dead letter; NaN says so."""
    jobs = [EncoderInput([[POISON]], [], scores=False), EncoderInput([[NAN]], [], scores=False)]
    raised, nan = run_batch(TinyModel(), jobs).outcomes

    assert isinstance(raised, EncodeFailure)
    assert raised.message == "RuntimeError: poisoned"
    assert "Traceback" in raised.trace
    assert isinstance(nan, EncodeFailure)
    assert "not numbers" in nan.message


def test_an_encoder_scores_by_cosine() -> None:
    """The first text of a job is compared with each other one."""
    model = TinyModel()
    texts = [[3, 4], [3, 4], [9], [1, 1, 1]]
    (found,) = run_batch(model, [EncoderInput(texts, [], scores=True)]).outcomes
    query, *rows = [np.array(model.row(text)) for text in texts]
    expected = [row @ query / np.linalg.norm(row) / np.linalg.norm(query) for row in rows]

    assert isinstance(found, Scores)
    assert found.scores == pytest.approx(expected, rel=1e-5)
    assert found.raw == found.scores


def test_a_cross_encoder_scores_pairs() -> None:
    """Scores are sigmoids of raw ones, large ones included; token types are 0 where a job has none."""
    jobs = [
        EncoderInput([[1, 2], [900]], [], scores=True),
        EncoderInput([[1, 2]], [[0, 1]], scores=True),
    ]
    first, second = run_batch(TinyReranker(), jobs).outcomes

    assert isinstance(first, Scores)
    assert isinstance(second, Scores)
    assert (first.raw, second.raw) == ([3.0, 900.0], [2.0])
    assert first.scores == pytest.approx([0.95257, 1.0], abs=1e-5)
