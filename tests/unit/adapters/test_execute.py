"""One batch on a model: results per job, the guilty found, nothing raised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, Unavailable
from common.wire.jobs import ScoreWork
from common.wire.message import encode
from common.wire.results import EmbedResult, ScoreResult
from common.wire.search import DocumentsWork
from engine.encoder.executor import EncodeFailure
from services.adapters.encode.job import EncodeJob, read_job, run_jobs
from tests.support.fake_encoders import FINGERPRINT, NAN, POISON, TinyModel, lease, work


def job(model: TinyModel, payload: bytes) -> EncodeJob:
    """Return a payload as a job read just now."""
    return read_job(lease(payload), model, 0, 0.0)


@given(
    st.lists(
        st.lists(
            st.lists(st.integers(1, 9) | st.sampled_from([POISON, NAN]), min_size=1, max_size=3),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=6,
    )
)
def test_only_the_guilty_fail(payloads: list[list[list[int]]]) -> None:
    """A job fails if and only if its own texts fail; every other job gets its own vectors."""
    model = TinyModel()
    ran = run_jobs(model, [job(model, work(*texts)) for texts in payloads])

    for texts, outcome in zip(payloads, ran.outcomes, strict=True):
        guilty = any(POISON in text or NAN in text for text in texts)
        assert isinstance(outcome, EncodeFailure) == guilty
        if isinstance(outcome, EmbedResult):
            rows = np.frombuffer(outcome.vectors, "<f4").reshape(-1, 4)
            assert rows.tolist() == [model.row(text) for text in texts]
            assert outcome.tokens == sum(len(text) for text in texts)


def test_failures_are_explained() -> None:
    """A raised error keeps its kind, message and trace for the dead letter; NaN says so."""
    model = TinyModel()
    raised, nan = run_jobs(model, [job(model, work([POISON])), job(model, work([NAN]))]).outcomes

    assert isinstance(raised, EncodeFailure)
    assert raised.message == "RuntimeError: poisoned"
    assert "Traceback" in raised.trace
    assert isinstance(nan, EncodeFailure)
    assert "not numbers" in nan.message


def test_scores_are_cosines() -> None:
    """With an encoder, documents are scored by their cosine to the query."""
    model = TinyModel()
    payload = encode(
        ScoreWork(fingerprint=FINGERPRINT, query=[3, 4], documents=[[3, 4], [9], [1, 1, 1]])
    )
    (outcome,) = run_jobs(model, [job(model, payload)]).outcomes
    assert isinstance(outcome, ScoreResult)
    query = np.array(model.row([3, 4]))
    rows = np.array([model.row(text) for text in ([3, 4], [9], [1, 1, 1])])
    expected = rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)

    assert outcome.scores == pytest.approx(expected.tolist(), rel=1e-5)
    assert outcome.tokens == 8


def test_bad_payloads_are_refused() -> None:
    """What is no work for this model is refused with a reason; another encoder's work can be sent again."""
    model = TinyModel()
    bad = [
        b"",
        b"\xff" * 50,
        work(),
        work([]),
        encode(DocumentsWork(collection="c", op="get")),
        work([1])[:-1],
    ]
    for payload in bad:
        with pytest.raises(InvalidRequest):
            job(model, payload)
    with pytest.raises(Unavailable, match="send the request again"):
        job(model, work([1], fingerprint="0" * 32))
