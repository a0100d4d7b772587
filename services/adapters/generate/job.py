"""One leased generation: its choices, its place in its log, and what it ends with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from common.errors import InvalidRequest, SpillwayError, Unavailable
from common.pages.identity import owner_id, root_id
from common.wire.jobs import GenerateWork, decode_work
from common.wire.message import BadMessage, encode
from common.wire.results import Delta, Event, GenerateResult, Piece, decode_delta
from common.wire.sessions import Turn
from common.worker.leases import Lease
from engine.decoder.executor.interface import Executor
from engine.decoder.executor.isolated_step import StepFailure
from engine.decoder.output.choice import Choice
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sequence import TokenSequence

FOLD_EVERY = 512


class GenerationJob:
    """A job being generated; `generation` is the incarnation of the worker that leased it.

    `next_index` is its log's length as far as it is acknowledged; `pieces` is everything logged so far. It ends with
    `failure` (charged to it), with `refusal` (another try would not help), or with its result.
    """

    def __init__(
        self, lease: Lease, work: GenerateWork, choices: list[Choice], generation: int
    ) -> None:
        self.id, self.work, self.choices, self.generation = lease.job, work, choices, generation
        self.deadline_ms = lease.deadline_ms
        self.read_at = time.monotonic()
        self.waits = True  # for the first step that has it
        self.next_index = 0
        self.pieces: list[Piece] = []
        self.taken_over = False
        self.failure: StepFailure | None = None
        self.refusal: SpillwayError | None = None
        self.ending = False
        self.emitting: tuple[Event, list[Piece], bool] | None = None

    @property
    def session(self) -> str:
        """The session whose turn it is; empty if it is none."""
        return self.work.turn.session if self.work.turn is not None else ""

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences of choices that have not ended."""
        return [choice.sequence for choice in self.choices if choice.finish is None]

    @property
    def over(self) -> bool:
        """True if nothing more will be generated."""
        stopped = self.failure is not None or self.refusal is not None
        return stopped or all(choice.finish is not None for choice in self.choices)

    @property
    def started(self) -> bool:
        """True once pages were given to one of its sequences, or anything was logged."""
        return self.next_index > 0 or any(c.sequence.cached >= 0 for c in self.choices)

    def event(self) -> tuple[Event, bool] | None:
        """Return the event to log now and whether it folds the log; None if there is nothing new.

        The same event is returned until `acknowledged`, so that a lost reply can be asked for again.
        """
        if self.emitting is None:
            at = self.next_index
            fresh = [piece for choice in self.choices if (piece := choice.take(at)) is not None]
            if not fresh:
                return None
            fold = (at + 1) % FOLD_EVERY == 0
            try:
                data = encode(Delta(pieces=self.pieces + fresh if fold else fresh))
            except ValueError:  # too long to fold: the log keeps its single events
                fold, data = False, encode(Delta(pieces=fresh))
            self.emitting = Event(index=at, kind="progress", data=data), fresh, fold
        event, _, fold = self.emitting
        return event, fold

    def acknowledged(self) -> None:
        """The event last returned is in the log."""
        if self.emitting is not None:
            self.pieces += self.emitting[1]
            self.next_index += 1
            self.emitting = None

    def restore(self, events: Sequence[Event]) -> None:
        """Take over where its log ends; BadMessage or InternalError if that cannot be understood."""
        for event in events:
            self.pieces += decode_delta(event.data).pieces
            self.next_index = event.index + 1
        self.taken_over = bool(events)
        for choice in self.choices:
            choice.restore(piece for piece in self.pieces if piece.choice == choice.number)
            choice.sequence.resume(choice.tokens)

    def result(self) -> GenerateResult:
        """Return what the finished job is told to have cost."""
        firsts = self.choices[:: self.work.n]
        return GenerateResult(
            prompt_tokens=sum(len(prompt) for prompt in self.work.prompts),
            completion_tokens=sum(len(choice.tokens) for choice in self.choices),
            cached_tokens=sum(max(0, choice.sequence.cached) for choice in firsts),
            version=self.work.turn.version + 1 if self.work.turn is not None else None,
        )

    def usage(self) -> dict[str, int]:
        """Return what it has cost so far, by OpenTelemetry's names."""
        told = self.result()
        return {
            "gen_ai.usage.input_tokens": told.prompt_tokens,
            "gen_ai.usage.output_tokens": told.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": told.cached_tokens,
        }

    def turn(self, now_ms: int, *, partial: bool = False) -> Turn | None:
        """Return the session's turn: the answer and its tokens, for a partial one as far as they are logged."""
        asked, choice = self.work.turn, self.choices[0]
        if asked is None:
            return None
        logged = sum(len(piece.tokens) for piece in self.pieces)
        return Turn(
            job=self.id,
            history=asked.history,
            messages=asked.messages,
            shown=asked.shown,
            answer="".join(piece.text for piece in self.pieces),
            prompt=self.work.prompts[0][asked.history :],
            output=choice.kept[:logged] if partial else choice.kept,
            finish=choice.finish or "cancelled",
            at_ms=now_ms,
            partial=partial,
            retrieval=asked.retrieval,
        )


def read_work(lease: Lease, runner: Executor) -> GenerateWork:
    """Decode and check a lease's payload for this model; SpillwayError says why it cannot be done."""
    try:
        work = decode_work(lease.payload)
    except BadMessage as error:
        raise InvalidRequest(
            f"job {lease.job}: payload is no work this worker knows: {error}"
        ) from error
    if not isinstance(work, GenerateWork):
        raise InvalidRequest(f"job {lease.job}: {type(work).__name__} is no work for a generator")
    if work.fingerprint != runner.fingerprint:
        raise Unavailable(
            f"job {lease.job} was made for model {work.fingerprint}, this worker has "
            f"{runner.name} {runner.fingerprint}: the model was replaced meanwhile; send the request again"
        )
    for problem in _problems(work, runner):
        raise InvalidRequest(f"job {lease.job}: {problem}")
    return work


def _problems(work: GenerateWork, runner: Executor) -> Iterator[str]:
    """Yield what is wrong with a work's numbers."""
    shape = runner.shape
    if not work.prompts or work.n < 1 or work.max_new < 0:
        yield "expected at least one prompt, n at least 1 and max_new at least 0"
    if work.turn is not None:
        if len(work.prompts) != 1 or work.n != 1:
            yield "a session's turn has one prompt and one choice"
        elif not 0 <= work.turn.history <= len(work.prompts[0]):
            yield f"history is {work.turn.history}, the prompt has {len(work.prompts[0])} tokens"
    named = [*work.stop_ids, *work.sampling.bias]
    if named and not 0 <= min(named) <= max(named) < shape.vocabulary:
        yield f"a stop id or a biased token is outside of 0 to {shape.vocabulary - 1}"
    for number, prompt in enumerate(work.prompts):
        if not prompt:
            yield f"prompt {number} has no tokens"
        elif len(prompt) + work.max_new > shape.context:
            yield (
                f"prompt {number} has {len(prompt)} tokens and max_new is {work.max_new}: "
                f"model {runner.name} takes {shape.context} in all"
            )
        elif not 0 <= min(prompt) <= max(prompt) < shape.vocabulary:
            yield f"prompt {number} has a token outside of 0 to {shape.vocabulary - 1}"


def build(
    lease: Lease,
    work: GenerateWork,
    events: Sequence[Event],
    vocabulary: Vocabulary,
    *,
    order: int,
    generation: int,
) -> GenerationJob:
    """Make the job of checked work, at the point where its logged `events` end; its sequences count from `order`."""
    root, owner = root_id(work.fingerprint, work.scope), owner_id(work.scope)
    choices = []
    for number in range(len(work.prompts) * work.n):
        prompt = work.prompts[number // work.n]
        most = len(prompt) + work.max_new
        sequence = TokenSequence(
            lease.job,
            number,
            order + number,
            prompt,
            root=root,
            most=most,
            due_ms=lease.deadline_ms,
            low=work.low,
            owner=owner,
        )
        choices.append(Choice(number, work, sequence, vocabulary))
    job = GenerationJob(lease, work, choices, generation)
    job.restore([event for event in events if event.kind == "progress"])
    for choice in choices:
        if choice.finish is None and work.forced is not None:
            choice.force(work.forced)
        choice.start()
    return job
