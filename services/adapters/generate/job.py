"""The leased generation job: the engine's generation, its log, and its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.errors import InvalidRequest, SpillwayError, Unavailable
from common.pages.identity import owner_id, root_id, short_context
from common.wire.control import Applied, span_problem
from common.wire.jobs import GenerateWork, decode_work
from common.wire.message import BadMessage, encode
from common.wire.results import Delta, Event, GenerateResult, Piece, decode_delta
from common.wire.retrievals import retrieval_of
from common.wire.sessions import Turn
from common.worker.leases import Lease
from common.worker.outbox import SessionPart
from engine.decoder.executor.interface import Executor
from engine.decoder.executor.step import StepFailure
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import Choice, ChoiceOutput, StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sampling.grammar import CompiledGrammar
from services.adapters.generate.extensions import PromptExtensions

FOLD_EVERY = 512


class _Emitting(NamedTuple):
    """An event that is not acknowledged yet, its additions to the log, and whether it folds the log."""

    event: Event
    pieces: list[Piece]
    applied: list[Applied]
    fold: bool


class GenerationJob:
    """A job being generated; `incarnation` is the generation of the worker's name under which the lease was read.

    `next_index` is the acknowledged length of its log; `pieces` are all logged outputs, and `extensions` the extensions
    of its prompt. The job ends with `failure` (charged to the job), with `refusal` (another try would not help), or
    with its result.
    """

    def __init__(
        self, lease: Lease, work: GenerateWork, generation: Generation, incarnation: int
    ) -> None:
        self.id, self.work, self.generation = lease.job, work, generation
        self.incarnation, self.deadline_ms = incarnation, lease.deadline_ms
        self.waits_since_s: float | None = None  # None after the job's first part in a step
        self.next_index = 0
        self.pieces: list[Piece] = []
        first = work.prompts[0] if work.prompts else ()
        self.extensions = PromptExtensions(work.extensions, first, work.spans)
        self.taken_over = False
        self.refusal: SpillwayError | None = None
        self.ending = False
        self.emitting: _Emitting | None = None

    @property
    def choices(self) -> list[Choice]:
        """The choices of the generation."""
        return self.generation.choices

    @property
    def failure(self) -> StepFailure | None:
        """The error that ended the generation, if any."""
        return self.generation.failure

    @property
    def session(self) -> str:
        """The session whose turn the job is; empty for a job without a session."""
        return self.work.turn.session if self.work.turn is not None else ""

    @property
    def over(self) -> bool:
        """True if the generation has ended."""
        return self.refusal is not None or self.generation.over

    @property
    def started(self) -> bool:
        """True once a sequence of the job has had pages, or an event was logged."""
        return self.next_index > 0 or any(c.sequence.cached >= 0 for c in self.choices)

    def event(self) -> tuple[Event, bool] | None:
        """Return the event to log now, and whether the event folds the log; None if there is no new output.

        The same event is returned until `acknowledged`, so that an event whose reply was lost is repeated unchanged.
        """
        if self.emitting is None:
            at = self.next_index
            gained = [(choice.number, choice.take()) for choice in self.choices]
            fresh = [_piece(at, number, output) for number, output in gained if output is not None]
            applied = self.extensions.take(at)
            if not fresh and not applied:
                return None
            fold = (at + 1) % FOLD_EVERY == 0
            delta = Delta(pieces=fresh, applied=applied)
            try:
                data = encode(self._folded(delta) if fold else delta)
            except ValueError:  # too long to fold: the log keeps its separate events
                fold, data = False, encode(delta)
            event = Event(index=at, kind="progress", data=data)
            self.emitting = _Emitting(event, fresh, applied, fold)
        return self.emitting.event, self.emitting.fold

    def _folded(self, delta: Delta) -> Delta:
        return Delta(
            pieces=self.pieces + delta.pieces, applied=self.extensions.applied + delta.applied
        )

    def acknowledged(self) -> int:
        """Record that the last returned event is logged; return the number of its last extension, or 0."""
        if self.emitting is None:
            return 0
        _, pieces, applied, _ = self.emitting
        self.pieces += pieces
        self.extensions.applied += applied
        self.next_index += 1
        self.emitting = None
        return applied[-1].extension.number if applied else 0

    def restore(self, events: Sequence[Event]) -> None:
        """Continue at the end of a log; BadMessage or InternalError if the log cannot be decoded or is inconsistent."""
        applied: list[Applied] = []
        for event in events:
            delta = decode_delta(event.data)
            self.pieces += delta.pieces
            applied += delta.applied
            self.next_index = event.index + 1
        self.taken_over = bool(events)
        for choice in self.choices:
            choice.restore(_output(piece) for piece in self.pieces if piece.choice == choice.number)
        if self.choices:
            first = self.choices[0]
            self.extensions.restore(applied, len(first.tokens))
            first.boundary = self.extensions.boundary
            if applied:
                first.sequence.rewrite(self.extensions.logged, self.extensions.logged_spans)
        for choice in self.choices:
            choice.sequence.resume(choice.tokens)

    def result(self) -> GenerateResult:
        """Return the result of the finished job: token counts of its prompts, as admitted, and of its answers."""
        firsts = zip(self.choices[:: self.work.n], self.work.prompts, strict=True)
        return GenerateResult(
            prompt_tokens=sum(len(prompt) for prompt in self.work.prompts),
            completion_tokens=sum(len(choice.tokens) for choice in self.choices),
            cached_tokens=sum(
                min(max(0, choice.sequence.cached), len(prompt)) for choice, prompt in firsts
            ),
            version=self.work.turn.version + 1 if self.work.turn is not None else None,
        )

    def usage(self) -> dict[str, int]:
        """Return the numbers of used tokens under OpenTelemetry's names."""
        result = self.result()
        return {
            "gen_ai.usage.input_tokens": result.prompt_tokens,
            "gen_ai.usage.output_tokens": result.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": result.cached_tokens,
        }

    def turn(self, now_ms: int, *, partial: bool = False) -> SessionPart | None:
        """Return the session's turn: the answer and its tokens; for a partial turn only the logged tokens.

        Its prompt is the last extended one, since the pages at the end hold that prompt and the answer.
        """
        asked, choice = self.work.turn, self.choices[0]
        if asked is None:
            return None
        logged = sum(len(piece.tokens) for piece in self.pieces)
        turn = Turn(
            job=self.id,
            history=asked.history,
            messages=asked.messages,
            shown=asked.shown,
            answer="".join(piece.text for piece in self.pieces),
            prompt=self.extensions.logged[asked.history :],
            output=choice.kept[:logged] if partial else choice.kept,
            finish=choice.finish or "cancelled",
            at_ms=now_ms,
            partial=partial,
            retrieval=retrieval_of(asked.retrieval, self.extensions.applied),
            asked=asked.asked,
        )
        return turn, asked


def _piece(at: int, choice: int, output: ChoiceOutput) -> Piece:
    """Return the wire form of a choice's output, first logged in event `at`."""
    return Piece(
        at=at,
        choice=choice,
        tokens=output.tokens,
        text=output.text,
        finish=output.finish,
        stopped_by=output.stopped_by,
        logprobs=list(output.logprobs),
    )


def _output(piece: Piece) -> ChoiceOutput:
    """Return the engine's form of a logged piece, without log probabilities, which are not needed again."""
    return ChoiceOutput(piece.tokens, piece.text, piece.finish, piece.stopped_by)


def read_work(lease: Lease, executor: Executor) -> GenerateWork:
    """Decode and check a lease's payload for this model; SpillwayError has the reason if the job cannot be executed."""
    try:
        work = decode_work(lease.payload)
    except BadMessage as error:
        raise InvalidRequest(
            f"job {lease.job}: payload is no work this worker knows: {error}"
        ) from error
    if not isinstance(work, GenerateWork):
        raise InvalidRequest(f"job {lease.job}: {type(work).__name__} is no work for a generator")
    if work.fingerprint != executor.fingerprint:
        raise Unavailable(
            f"job {lease.job} was made for model {work.fingerprint}, this worker has "
            f"{executor.name} {executor.fingerprint}: the model was replaced meanwhile; send the request again"
        )
    for problem in _problems(work, executor):
        raise InvalidRequest(f"job {lease.job}: {problem}")
    return work


def _problems(work: GenerateWork, executor: Executor) -> Iterator[str]:
    """Yield the errors in the numbers of a job's work."""
    shape = executor.shape
    if not work.prompts or work.n < 1 or work.max_new < 0:
        yield "expected at least one prompt, n at least 1 and max_new at least 0"
    if work.turn is not None:
        if len(work.prompts) != 1 or work.n != 1:
            yield "a session's turn has one prompt and one choice"
        elif not 0 <= work.turn.history <= len(work.prompts[0]):
            yield f"history is {work.turn.history}, the prompt has {len(work.prompts[0])} tokens"
    yield from _rule_problems(work)
    yield from _span_problems(work, executor)
    if work.grammar is not None and not executor.grammars:
        yield f"model {executor.name} cannot keep to a grammar here"
    named = [*work.stop_ids, *work.shown, *work.sampling.bias]
    if named and not 0 <= min(named) <= max(named) < shape.vocabulary:
        yield f"a stop id, a shown or a biased token is outside of 0 to {shape.vocabulary - 1}"
    for number, prompt in enumerate(work.prompts):
        if not prompt:
            yield f"prompt {number} has no tokens"
        elif len(prompt) + work.max_new > shape.context:
            yield (
                f"prompt {number} has {len(prompt)} tokens and max_new is {work.max_new}: "
                f"model {executor.name} takes {shape.context} in all"
            )
        elif not 0 <= min(prompt) <= max(prompt) < shape.vocabulary:
            yield f"prompt {number} has a token outside of 0 to {shape.vocabulary - 1}"


def _rule_problems(work: GenerateWork) -> Iterator[str]:
    """Yield the errors in the rule by which a job takes extensions."""
    rule = work.extensions
    if rule is None:
        return
    if len(work.prompts) != 1 or work.n != 1:
        yield "a generation that takes extensions has one prompt and one choice"
    if rule.every < 1 or rule.most < 0:
        yield (
            f"extensions are taken every {rule.every} tokens, {rule.most} times: "
            "expected 1 or more tokens, and 0 or more times"
        )


def _span_problems(work: GenerateWork, executor: Executor) -> Iterator[str]:
    """Yield the errors in the spans of a job's passages."""
    if not work.spans:
        return
    if not executor.precomputes:
        yield f"model {executor.name} cannot compute passages alone on this worker"
    if len(work.prompts) != 1:
        yield f"passages are computed alone in one prompt, not in {len(work.prompts)}"
    elif problem := span_problem(work.spans, len(work.prompts[0])):
        yield problem


def build(
    lease: Lease,
    work: GenerateWork,
    events: Sequence[Event],
    vocabulary: Vocabulary,
    *,
    order: int,
    incarnation: int,
    grammar: CompiledGrammar | None = None,
) -> GenerationJob:
    """Build the job of checked work, continued at the end of its logged `events`; its sequences count from `order`.

    `grammar` is the work's compiled grammar.
    """
    request = GenerationRequest(
        id=lease.job,
        prompts=work.prompts,
        stop=StopRules(
            work.max_new, work.min_new, work.stop, () if work.ignore_eos else work.stop_ids
        ),
        root=root_id(work.fingerprint, work.scope),
        n=work.n,
        sampling=work.sampling,
        logprobs=work.logprobs,
        forced=work.forced,
        owner=owner_id(work.scope),
        low=work.low,
        due_ms=lease.deadline_ms,
        grammar=grammar,
        shown=work.shown,
        short_context=short_context(work.fingerprint),
        spans=work.spans,
    )
    generation = Generation(request, vocabulary, order)
    job = GenerationJob(lease, work, generation, incarnation)
    job.restore([event for event in events if event.kind == "progress"])
    generation.start()
    return job
