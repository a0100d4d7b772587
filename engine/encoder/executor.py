"""The encoder's executor: computes a batch of jobs together; if that raises, computes each job alone."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.clock import SYSTEM, Clock
from common.errors import SpillwayError
from engine.encoder.model import EncoderModel, Floats


class EncoderInput(NamedTuple):
    """The token lists of one job: texts, or pairs for a cross-encoder, whose token types are `types` ([]: all 0).

    With `scores` the job asks for scores: of each pair from a cross-encoder, of the first text with each other text
    from an encoder.
    """

    rows: list[list[int]]
    types: list[list[int]]
    scores: bool


class Scores(NamedTuple):
    """Scores of one job in the order of its pairs or documents; `raw` are a cross-encoder's before the sigmoid."""

    scores: list[float]
    raw: list[float]


class EncodeFailure(NamedTuple):
    """The error of a job whose own computation raised, or returned values that are not finite."""

    code: str
    message: str
    trace: str


class EncodeResult(NamedTuple):
    """Each job's vectors (items, dimension), scores or failure, and the seconds that the device took.

    A batch is `isolated` if it raised and its jobs were run one by one.
    """

    outcomes: list[Floats | Scores | EncodeFailure]
    seconds: float
    isolated: bool


def run_batch(
    model: EncoderModel, jobs: Sequence[EncoderInput], clock: Clock = SYSTEM
) -> EncodeResult:
    """Compute a batch on the calling thread; errors that jobs cause are returned, not raised."""
    started_s = clock.perf_s()
    outcomes, isolated = _attempt(model, jobs), False
    if len(jobs) > 1 and any(isinstance(outcome, EncodeFailure) for outcome in outcomes):
        isolated = True
        outcomes = [
            _attempt(model, [job])[0] if isinstance(outcome, EncodeFailure) else outcome
            for job, outcome in zip(jobs, outcomes, strict=True)
        ]
    return EncodeResult(outcomes, clock.perf_s() - started_s, isolated)


def _attempt(
    model: EncoderModel, jobs: Sequence[EncoderInput]
) -> list[Floats | Scores | EncodeFailure]:
    try:
        return _compute(model, jobs)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its jobs' failure, not the worker's
        message = (
            error.message
            if isinstance(error, SpillwayError)
            else f"{type(error).__name__}: {error}"
        )
        return [EncodeFailure("model_error", message, traceback.format_exc())] * len(jobs)


def _compute(
    model: EncoderModel, jobs: Sequence[EncoderInput]
) -> list[Floats | Scores | EncodeFailure]:
    rows = [row for job in jobs for row in job.rows]
    if model.reranks:
        types = [types for job in jobs for types in job.types or [[0] * len(r) for r in job.rows]]
        values = model.score(rows, types if any(map(any, types)) else [])[:, None]
    else:
        values = model.encode(rows)
    ends = np.cumsum([len(job.rows) for job in jobs])
    parts = np.split(values, ends[:-1])
    return [_outcome(model, job, part) for job, part in zip(jobs, parts, strict=True)]


def _outcome(
    model: EncoderModel, job: EncoderInput, part: Floats
) -> Floats | Scores | EncodeFailure:
    if not np.isfinite(part).all():
        return EncodeFailure("model_error", "the model gave values that are not numbers", "")
    if not job.scores:
        return part
    if model.reranks:
        raw = [float(value) for value in part[:, 0]]
        return Scores([_sigmoid(value) for value in raw], raw)
    unit = part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
    cosines = [float(value) for value in unit[1:] @ unit[0]]
    return Scores(cosines, cosines)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
