"""Retrieval while an answer is written (PipeRAG): for each interval the passages in the prompt are retrieved again.

The generate job runs in its worker; this module follows the job's log, searches meanwhile, and sends the passages to
the job as extensions. The result of a retrieval is a function of the request, the retrieval's number and the tokens
before it, and so are the ids of its jobs: a router that takes over repeats the last retrieval, whose jobs and extension
exist, and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from opentelemetry.trace import Span

from common import tracing
from common.bus import BusDown
from common.clock import Clock
from common.errors import Cancelled, DeadlineExceeded, SpillwayError
from common.ids import family_of
from common.tasks import cancel
from common.wire.control import Applied, Extend
from common.wire.results import Event, decode_delta
from common.wire.retrievals import RetrievalHistory, RetrievalNote, RetrievalRecord
from common.wire.search import Effort, SearchReport
from common.wire.workflows import GroundPlan
from services.router.responses.answer_sources import follow
from services.router.text.chats import SessionHistory
from services.router.text.grounded import GroundedSpec
from services.router.text.intervals import NO_CHANGE, WINDOW, Pace, Schedule, Splice, budget_s
from services.router.text.passage_spans import PassageSpan
from services.router.text.passages import Passage, passage_rows
from services.router.text.replacements import Replacement, replacement, window_query
from services.router.text.tokens import Spec
from services.router.workflows.embed import encoder_of
from services.router.workflows.search import find
from services.router.workflows.timeline import StageTimeline
from services.router.workflows.workflow import Workflow

INTERVAL_STAGE = "interval"
_LEAST_BUDGET_MS = 0.1  # a search that has no time left makes the least effort


class IntervalRetrieval:
    """The retrievals of one grounded answer while its job writes it; `run` once.

    A failed retrieval does not end the answer: the passages stay, and the answer's readers are told the reason.
    """

    def __init__(
        self,
        workflow: Workflow,
        plan: GroundPlan,
        job: str,
        made: GroundedSpec,
        spec: Spec,
        history: SessionHistory | None,
    ) -> None:
        """`made` is the spec of the generate job, with its `slot`; `history` is the session before the job's turn."""
        retrieval, slot = plan.chat.retrieval, made.slot
        assert retrieval is not None
        assert slot is not None
        assert isinstance(retrieval.interval, int)
        self._workflow, self._plan, self._job = workflow, plan, job
        self._slot, self._spec, self._history = slot, spec, history
        self._retrieval, self._record = retrieval, plan.collection
        self._schedule = Schedule.of(retrieval.interval, slot.max_new, stale=retrieval.stale)
        self._shift = 0
        if retrieval.stale:
            self._shift = retrieval.interval if retrieval.shift is None else retrieval.shift
        self._pace = Pace(retrieval.interval, 0.0)
        self._tokens: list[int] = []
        self._grown = asyncio.Event()
        self._next = 1
        self._rests = RetrievalHistory(made.retrieval)  # by the job's log
        self._known = list(slot.passages)
        self._sent = Replacement(slot.passages)  # the last one sent, perhaps not in force
        self._intervals = _Intervals(workflow.timeline, retrieval.interval)
        self._accepted_ms = 0

    async def run(self) -> Event:
        """Retrieve until the answer is over, and return the job's outcome."""
        self._pace.token_s = await self._step_s()
        state = await self._workflow.context.bus.jobs.get(self._workflow.request)
        self._accepted_ms = 0 if state is None else state.created_ms
        if self._workflow.lease.attempts > 1:
            await self._restore()
        following = asyncio.create_task(self._follow(), name="follow an answer")
        retrieving = asyncio.create_task(self._retrieve_all(), name="retrieve for an answer")
        try:
            await asyncio.wait({following, retrieving}, return_when=asyncio.FIRST_COMPLETED)
            if retrieving.done():
                retrieving.result()
            outcome = await following
        finally:
            left = not retrieving.done()
            await cancel(following, retrieving)
            self._intervals.end()
        if left:
            await self._workflow.cancel_jobs()  # jobs of a retrieval that nobody waits for any more
        return outcome

    async def _step_s(self) -> float:
        """Return the seconds per token that the fastest worker publishes, 0 if no worker publishes any."""
        records = await self._workflow.context.bus.workers.records(family_of(self._job))
        return min((each.beta_s for each in records.values() if each.beta_s > 0), default=0.0)

    async def _restore(self) -> None:
        """Restore the state that another router's retrievals left, from the extensions in the job's log."""
        for event in await self._workflow.context.bus.jobs.log(self._job):
            if event.ends:
                return
            for applied in decode_delta(event.data).applied:
                extension = applied.extension
                self._rests.take(applied)
                self._next = extension.number + 1
                if extension.changes:
                    change = Splice(extension.start, extension.removed, extension.tokens)
                    self._sent = Replacement(self._in_force, change, spans=extension.spans)
        self._known = msgspec.convert(self._rests.shown["passages"], list[Passage])

    @property
    def _in_force(self) -> list[Passage]:
        """The passages in the prompt, according to the job's log."""
        rows = msgspec.convert(self._rests.shown["passages"], list[Passage])
        known = {passage.index: passage for passage in rows}
        return [known[index] for index in self._rests.in_force]

    # -- the answer

    async def _follow(self) -> Event:
        """Record the answer's tokens as they arrive, and return the job's outcome."""
        workflow = self._workflow
        items = follow(workflow.context.notifications, self._job, workflow.deadline_ms)
        async with aclosing(items):
            async for item in items:
                if isinstance(item, Event):
                    return item
                if isinstance(item, Applied):
                    self._rests.take(item)
                    if not item.extension.note:  # the worker has refused the extension
                        self._sent = Replacement(self._in_force)
                elif item.tokens:
                    self._grow(item.tokens)
        raise AssertionError("an answer has an outcome")

    def _grow(self, tokens: list[int]) -> None:
        self._tokens += tokens
        now_s = self._workflow.context.bus.clock.perf_s()
        self._pace.note(len(self._tokens), now_s)
        self._intervals.note(len(self._tokens), now_s)
        self._grown.set()

    async def _written(self, tokens: int) -> None:
        """Wait until the answer has `tokens` tokens."""
        while len(self._tokens) < tokens:
            self._grown.clear()
            await self._grown.wait()

    # -- retrievals

    async def _retrieve_all(self) -> None:
        schedule = self._schedule
        while self._next <= schedule.most:
            await self._written(schedule.asked(self._next))
            number = self._next
            if self._retrieval.late == "keep":  # skip those that are late
                number = max(number, schedule.current(len(self._tokens)))
            if number <= schedule.most:
                with tracing.span("retrieval", attributes={"spillway.retrieval": number}):
                    await self._retrieve(number)
            self._next = number + 1

    async def _retrieve(self, number: int) -> None:
        """Make one retrieval and send its passages; an error of the retrieval alone keeps the former passages."""
        attempt = _Attempt(self._workflow.context.bus.clock)
        kept, change, spans = "same", NO_CHANGE, list[PassageSpan]()
        try:
            made = await self._found(number, attempt)
            if made.kept is not None:
                kept = made.kept
            elif _numbers(made.passages) != _numbers(self._sent.passages):
                kept, change, spans = "", made.splice, list(made.spans)
                self._sent = made
                self._known += made.passages
        except (BusDown, DeadlineExceeded, Cancelled):
            raise
        except SpillwayError as error:
            kept = error.code
        if kept and self._retrieval.late == "keep":
            # The change sent before may not have taken effect yet.
            change, spans = self._sent.splice, list(self._sent.spans)
        note = self._note(number, attempt, kept)
        await self._workflow.context.bus.control.send(
            self._job, Extend(number=number, note=note, spans=spans, **change._asdict())
        )

    def _note(self, number: int, attempt: _Attempt, kept: str) -> bytes:
        """Return a retrieval's note for the job's log, and learn the margin from the time that the retrieval took."""
        took_s, due_at = attempt.passed_s, self._schedule.boundary(number)
        if attempt.predicted_s is not None:
            self._workflow.context.margin.learn(took_s, attempt.predicted_s)
        record = RetrievalRecord(
            at_token=due_at,
            query_at=self._schedule.asked(number),
            found=attempt.found,
            passages=_numbers(self._sent.passages),
            replaced=[],
            late=self._retrieval.stale and len(self._tokens) >= due_at,
            query_tokens=attempt.window,
            kept=kept or None,
            effort=attempt.effort,
            budget_ms=attempt.budget_ms,
            ms=round(1000 * took_s, 3),
            stages=self._stages(number),
        )
        include_text = self._retrieval.include_passages
        rows = passage_rows(self._sent.passages, include_text=include_text)
        return msgspec.json.encode(RetrievalNote(due_at, rows, record))

    def _stages(self, number: int) -> list[dict[str, Any]]:
        """Return when the stages of a retrieval ran, by the request's timeline."""
        times = self._workflow.timeline.times(self._accepted_ms)
        return [
            msgspec.to_builtins(time)
            for time in times
            if time.nth == number and time.name != INTERVAL_STAGE
        ]

    async def _found(self, number: int, attempt: _Attempt) -> Replacement:
        """Embed the latest tokens, search, and return the replacement of the prompt's passages by the hits."""
        workflow, plan, retrieval = self._workflow, self._plan, self._retrieval
        at, pool = self._schedule.asked(number), workflow.context.pool
        latest = self._tokens[max(0, at - WINDOW) : at]
        encoder = await encoder_of(workflow, self._record)
        query = await pool.run(
            partial(window_query, plan.chat, self._spec, encoder, self._record.query_prompt, latest)
        )
        attempt.window = query.window
        ask = msgspec.structs.replace(
            plan.search,
            many=False,
            count=1,
            tokens=[] if retrieval.mode == "text" else [query.tokens],
            texts=[] if retrieval.mode == "vector" else [query.text],
            following=self._shift > 0,
        )
        if retrieval.stale and ask.effort is None and ask.mode == "vector" and not ask.depth:
            attempt.budget_ms = self._budget_ms()
            ask = msgspec.structs.replace(
                ask, budget_ms=attempt.budget_ms, spent_ms=1000 * attempt.passed_s
            )
        found = await find(workflow, self._record, ask, plan.parcel, plan.queries, number)
        hits = found.hits[0][: retrieval.k]
        attempt.take(found.report, len(hits))
        first = 1 + number * retrieval.k  # unused, whichever retrievals took effect
        with workflow.timeline.stage("prompt", number):
            call = partial(
                replacement,
                plan.chat,
                self._spec,
                self._history,
                self._slot,
                hits,
                self._shift,
                self._known,
                first,
            )
            return await pool.run(call)

    def _budget_ms(self) -> float:
        """Return the milliseconds that a search may take: the predicted ones of an interval, less the margin."""
        margin_s = self._workflow.context.margin.value_s
        return max(_LEAST_BUDGET_MS, 1000 * budget_s(self._pace.interval_s, margin_s))


class _Intervals:
    """The intervals of an answer on its request's timeline and in its trace, numbered from 1."""

    def __init__(self, timeline: StageTimeline, interval: int) -> None:
        self._timeline, self._interval = timeline, interval
        self._nth, self._began_s, self._latest_s = 0, 0.0, 0.0
        self._span: Span = tracing.NONE

    def note(self, tokens: int, now_s: float) -> None:
        """Record that the answer has `tokens` tokens at `now_s`."""
        nth = (tokens - 1) // self._interval + 1
        if nth > self._nth:
            self.end()
            self._nth, self._began_s = nth, now_s
            attributes = {"spillway.interval": nth}
            self._span = tracing.start(
                INTERVAL_STAGE, "internal", tracing.current(), attributes=attributes
            )
        self._latest_s = now_s

    def end(self) -> None:
        """End the running interval with its last token."""
        self._span.end()
        if self._nth:
            self._timeline.note(INTERVAL_STAGE, self._nth, self._began_s, self._latest_s)


class _Attempt:
    """One retrieval under way: query tokens, hits, effort and budget for its note, and the predicted seconds."""

    def __init__(self, clock: Clock) -> None:
        self.window = self.found = 0
        self.effort: Effort | None = None
        self.budget_ms: float | None = None
        self.predicted_s: float | None = None
        self._clock, self._began_s = clock, clock.perf_s()

    @property
    def passed_s(self) -> float:
        """The seconds since the retrieval began."""
        return self._clock.perf_s() - self._began_s

    def take(self, report: SearchReport | None, found: int) -> None:
        """Record the report of the search and its number of hits."""
        self.found = found
        if report is not None:
            self.effort = report.effort
            if report.predicted_ms is not None:
                self.predicted_s = report.predicted_ms / 1000


def _numbers(passages: Sequence[Passage]) -> list[int]:
    return [passage.index for passage in passages]
