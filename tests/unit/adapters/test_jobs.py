"""Encode jobs: payloads read and refused, and the results of a batch as the bus takes them."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InvalidRequest, Unavailable
from common.wire.jobs import ScoreWork
from common.wire.message import encode
from common.wire.results import EmbedResult, Result, ScoreResult
from common.wire.search import DocumentsWork
from engine.encoder.executor import EncodeFailure
from services.adapters.encode.job import EncodeJob, read_job, result_of, run_jobs
from tests.support.fake_encoders import FINGERPRINT, POISON, TinyModel, lease, work


def job(model: TinyModel, payload: bytes) -> EncodeJob:
    """Return a payload as a job read just now."""
    return read_job(lease(payload), model, 0, 0.0)


def results(model: TinyModel, jobs: list[EncodeJob]) -> list[Result | EncodeFailure]:
    """Return what the bus takes of a batch."""
    return [
        outcome if isinstance(outcome, EncodeFailure) else result_of(each, outcome)
        for each, outcome in zip(jobs, run_jobs(model, jobs).outcomes, strict=True)
    ]


def test_results_and_failures() -> None:
    """Each job's result carries its own vectors and tokens; a failure stays one."""
    model = TinyModel()
    jobs = [job(model, work([1, 2], [3])), job(model, work([POISON])), job(model, work([4]))]
    first, failed, last = results(model, jobs)

    assert isinstance(first, EmbedResult)
    assert np.frombuffer(first.vectors, "<f4").reshape(-1, 4).tolist() == [
        model.row([1, 2]),
        model.row([3]),
    ]
    assert (first.dimension, first.tokens) == (4, 3)
    assert isinstance(failed, EncodeFailure)
    assert isinstance(last, EmbedResult)


def test_scores_are_cosines() -> None:
    """With an encoder, documents are scored by their cosine to the query."""
    model = TinyModel()
    payload = encode(
        ScoreWork(fingerprint=FINGERPRINT, query=[3, 4], documents=[[3, 4], [9], [1, 1, 1]])
    )
    (outcome,) = results(model, [job(model, payload)])
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
