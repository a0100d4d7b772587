"""Encode jobs: leases decoded and checked for one model, and their results in the bus' form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import InvalidRequest, Unavailable
from common.wire.jobs import EmbedWork, ScoreWork, decode_work
from common.wire.message import BadMessage
from common.wire.results import EmbedResult, Result, ScoreResult
from common.worker.leases import Lease
from engine.encoder.executor import (
    EncodeResult,
    EncoderInput,
    Scores,
    run_batch,
)
from engine.encoder.model import EncoderModel, Floats


class EncodeJob(NamedTuple):
    """A lease with the token lists to compute; `question` is true for the question of a search.

    The job was read at `read_s`, and last checked for cancellation at `asked_s` (monotonic clock).
    """

    lease: Lease
    input: EncoderInput
    items: int
    tokens: int
    generation: int
    read_s: float
    asked_s: float
    question: bool = False

    @property
    def unasked(self) -> bool:
        """True if the job was not checked since it was read, so that the bus does not know that it runs."""
        return self.asked_s == self.read_s

    @property
    def alone(self) -> bool:
        """True if the job must share no batch."""
        return self.lease.alone

    @property
    def batch(self) -> int:
        """The batch that admission planned the job in; 0: in none."""
        return self.lease.batch

    @property
    def due_ms(self) -> int:
        """The time at which the job should end, by the bus' clock."""
        return self.lease.due_ms


def read_job(lease: Lease, model: EncoderModel, generation: int, now_s: float) -> EncodeJob:
    """Decode and check a lease's payload for this model; SpillwayError has the reason if it cannot be computed."""
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
    found = _input(lease.job, work, model)
    if not found.rows or (model.reranks and not found.scores):
        raise InvalidRequest(f"job {lease.job}: nothing in it for model {model.name} to compute")
    model.check(found.rows)
    tokens = sum(map(len, found.rows))
    question = isinstance(work, EmbedWork) and work.question
    return EncodeJob(lease, found, len(found.rows), tokens, generation, now_s, now_s, question)


def _input(job: str, work: EmbedWork | ScoreWork, model: EncoderModel) -> EncoderInput:
    if isinstance(work, EmbedWork):
        return EncoderInput(work.tokens, [], scores=False)
    if not model.reranks:
        return EncoderInput([work.query, *work.documents], [], scores=True)
    if work.types and [len(x) for x in work.types] != [len(x) for x in work.pairs]:
        raise InvalidRequest(f"job {job}: token types differ in length from their pairs")
    return EncoderInput(work.pairs, work.types, scores=True)


def run_jobs(model: EncoderModel, jobs: Sequence[EncodeJob]) -> EncodeResult:
    """Compute a batch of jobs on the calling thread; errors that jobs cause are returned, not raised."""
    return run_batch(model, [job.input for job in jobs])


def result_of(job: EncodeJob, outcome: Floats | Scores) -> Result:
    """Return a job's computed vectors (items, dimension) or scores in the bus' form."""
    if isinstance(outcome, Scores):
        return ScoreResult(scores=outcome.scores, raw=outcome.raw, tokens=job.tokens)
    vectors = outcome.astype("<f4", copy=False).tobytes()
    return EmbedResult(dimension=outcome.shape[1], vectors=vectors, tokens=job.tokens)
