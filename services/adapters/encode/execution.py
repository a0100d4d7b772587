"""Run one batch of jobs on a model: together, or, if that raises, each alone, so that only the guilty fail."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.errors import InvalidRequest, SpillwayError, Unavailable
from common.wire.jobs import EmbedWork, ScoreWork, decode_work
from common.wire.message import BadMessage
from common.wire.results import EmbedResult, Result, ScoreResult
from common.worker.leases import Lease
from engine.encoder.model import EncoderModel, Floats


class EncodeJob(NamedTuple):
    """A lease with its decoded work; `rows` are all token lists it wants computed."""

    lease: Lease
    work: EmbedWork | ScoreWork
    rows: list[list[int]]
    items: int
    tokens: int
    alone: bool
    generation: int
    read_at: float

    @property
    def batch(self) -> int:
        """The batch the door planned it in; 0: in none."""
        return self.lease.batch

    @property
    def due_ms(self) -> int:
        """When it should end, at Redis' time."""
        return self.lease.due_ms


class EncodeFailure(NamedTuple):
    """A job whose own computation raised, or gave values that are not numbers."""

    code: str
    message: str
    trace: str


class EncodeResult(NamedTuple):
    """Outcomes in the order of the jobs, and the seconds the device took."""

    outcomes: list[Result | EncodeFailure]
    seconds: float
    isolated: bool


def read_job(lease: Lease, model: EncoderModel, generation: int, now: float) -> EncodeJob:
    """Decode and check a lease's payload for this model; SpillwayError says why it cannot be done."""
    try:
        work = decode_work(lease.payload)
    except BadMessage as error:
        raise InvalidRequest(
            f"job {lease.job}: payload is no work this worker knows: {error}"
        ) from error
    if not isinstance(work, EmbedWork | ScoreWork):
        raise InvalidRequest(f"job {lease.job}: {type(work).__name__} is no work for an encoder")
    if work.fingerprint != model.fingerprint:
        raise Unavailable(
            f"job {lease.job} was made for encoder {work.fingerprint}, this worker has "
            f"{model.name} {model.fingerprint}: the model was replaced meanwhile; send the request again"
        )
    if isinstance(work, EmbedWork):
        rows = work.tokens
    elif model.reranks:
        rows = work.pairs
        if work.types and [len(x) for x in work.types] != [len(x) for x in rows]:
            raise InvalidRequest(f"job {lease.job}: token types differ in length from their pairs")
    else:
        rows = [work.query, *work.documents]
    if not rows or (isinstance(work, EmbedWork) and model.reranks):
        raise InvalidRequest(f"job {lease.job}: nothing in it for model {model.name} to compute")
    model.check(rows)
    tokens = sum(len(row) for row in rows)
    return EncodeJob(lease, work, rows, len(rows), tokens, lease.alone, generation, now)


def run_batch(model: EncoderModel, jobs: Sequence[EncodeJob]) -> EncodeResult:
    """Compute a batch on the calling thread; it raises nothing a job can cause."""
    started = time.perf_counter()
    outcomes, isolated = _attempt(model, jobs), False
    if len(jobs) > 1 and any(isinstance(outcome, EncodeFailure) for outcome in outcomes):
        isolated = True
        outcomes = [
            _attempt(model, [job])[0] if isinstance(outcome, EncodeFailure) else outcome
            for job, outcome in zip(jobs, outcomes, strict=True)
        ]
    return EncodeResult(outcomes, time.perf_counter() - started, isolated)


def _attempt(model: EncoderModel, jobs: Sequence[EncodeJob]) -> list[Result | EncodeFailure]:
    try:
        return _compute(model, jobs)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its jobs' failure, not the worker's
        message = (
            error.message
            if isinstance(error, SpillwayError)
            else f"{type(error).__name__}: {error}"
        )
        return [EncodeFailure("model_error", message, traceback.format_exc())] * len(jobs)


def _compute(model: EncoderModel, jobs: Sequence[EncodeJob]) -> list[Result | EncodeFailure]:
    rows = [row for job in jobs for row in job.rows]
    if model.reranks:
        types = [kind for job in jobs for kind in _types(job)]
        values = model.score(rows, types if any(map(any, types)) else [])[:, None]
    else:
        values = model.encode(rows)
    outcomes: list[Result | EncodeFailure] = []
    at = 0
    for job in jobs:
        part = values[at : at + job.items]
        at += job.items
        if not np.isfinite(part).all():
            outcomes.append(
                EncodeFailure("model_error", "the model gave values that are not numbers", "")
            )
        else:
            outcomes.append(_result(model, job, part))
    return outcomes


def _types(job: EncodeJob) -> list[list[int]]:
    assert isinstance(job.work, ScoreWork)
    return job.work.types or [[0] * len(row) for row in job.rows]


def _result(model: EncoderModel, job: EncodeJob, part: Floats) -> Result:
    if isinstance(job.work, EmbedWork):
        vectors = part.astype("<f4", copy=False).tobytes()
        return EmbedResult(dimension=model.dimension, vectors=vectors, tokens=job.tokens)
    if model.reranks:
        raw = [float(value) for value in part[:, 0]]
        return ScoreResult(scores=[_sigmoid(value) for value in raw], raw=raw, tokens=job.tokens)
    unit = part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
    cosines = [float(value) for value in unit[1:] @ unit[0]]
    return ScoreResult(scores=cosines, raw=cosines, tokens=job.tokens)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
