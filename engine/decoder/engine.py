"""The decoder engine, without a bus: generations are added and aborted, and each step gives their choices tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from common.clock import SYSTEM, Clock
from common.cost.step import Step, attended
from common.errors import InternalError
from common.pages.store import PageStore
from engine.decoder.capacity import DecoderCapacity, decoding_of, prompts_beside, size_of
from engine.decoder.executor.interface import (
    Executor,
    HomeMoves,
    PageLoads,
    SampledToken,
    SequenceInput,
)
from engine.decoder.executor.step import (
    Following,
    StagedStep,
    StepFailure,
    StepHandle,
    StepQueue,
    StepResult,
    failure_of,
)
from engine.decoder.generation import Generation
from engine.decoder.kv.offload import CachePolicy, OffloadManager
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.output.choice import Choice
from engine.decoder.passage_rows import placed
from engine.decoder.prompt_lookup import MOST, PromptLookup, draft_length
from engine.decoder.scheduler import ScheduledRows, StepLimits
from engine.decoder.sequence import Range
from engine.device import DeviceQueue

# The most tokens that a step gives a sequence, and the most seconds of them all.
SEVERAL, SEVERAL_S = (
    4,
    0.1,
)
DRAFTED = 8  # with more sequences no tokens are guessed: further rows are not cheap then


class RunningStep(NamedTuple):
    """A submitted step: its parts, the generation of each part, its page loads, its size and predicted seconds.

    The step gives each sequence `tokens` tokens, one after another; `size` is the size of one such token's computation,
    `predicted_s` covers all. `rows` are set for a step in stages, which is needed if a sequence is at home on the host
    or pages change their home. A step is `placing` if it has passages that may have been computed before, so that its
    seconds do not follow from its size, which counts them as computed.
    """

    parts: list[ScheduledRows]
    generations: list[Generation]
    loading: PageLoads | None
    size: Step
    predicted_s: float
    handle: StepHandle
    tokens: int = 1
    rows: list[SequenceInput] | None = None
    placing: bool = False


class Progress(NamedTuple):
    """The outcome of a step for a generation: the choice that got tokens and their number, or (None) a failure."""

    generation: Generation
    choice: Choice | None
    tokens: int = 0


class DecoderEngine:
    """Runs generations on one executor. A step is `plan`, `submit`, the handle's result, `commit`; `step` calls all.

    While a step runs, `submit_ahead` may submit the next step, whose rows get the tokens that the running step draws:
    so the device does not wait for the event loop. An aborted generation takes part in no step planned later, and its
    tokens from submitted steps are dropped. Its pages are free at once; this is safe, since no page is given to other
    rows or overwritten by a copy before the submitted steps have ended. A choice that has reached its `boundary` is
    paused until `resume`. Not thread-safe: only one event loop may call the engine.
    """

    def __init__(
        self,
        executor: Executor,
        capacity: DecoderCapacity,
        limits: StepLimits,
        device: DeviceQueue,
        *,
        clock: Clock = SYSTEM,
        cache: CachePolicy | None = None,
        store: PageStore | None = None,
        lookup: bool = False,
        several: int = 1,
        homes: HomePlanner | None = None,
    ) -> None:
        """`cache` has the rules for keeping pages; `store` connects to the page tiers below the host, if there are any.

        With `lookup` the next tokens are guessed from the sequence's earlier text (see `prompt_lookup`). A step gives
        each sequence at most `several` tokens, one after another. With `homes` some sequences may be at home on the
        host and attended there.
        """
        self.homes = homes
        self._lookup, self._several = lookup, several
        # Counts of guessed tokens: computed, and right.
        self.drafted = self.accepted = 0
        self.executor, self.capacity, self.limits = executor, capacity, limits
        self.offload = OffloadManager(
            executor,
            limits,
            capacity.recompute_s,
            cache or CachePolicy(),
            store,
            self.wake,
            clock,
            homes,
        )
        self.scheduler = self.offload.scheduler
        self._steps = StepQueue(executor, device, clock)
        self._clock = clock
        self._generations: dict[str, Generation] = {}
        # The running step, and at most one step submitted ahead.
        self._submitted: deque[RunningStep] = deque()
        self._changed = asyncio.Event()  # set when a step may find more to compute

    @property
    def running(self) -> RunningStep | None:
        """The oldest submitted step that is not committed; None if there is none."""
        return self._submitted[0] if self._submitted else None

    @property
    def idle(self) -> bool:
        """True if there is nothing to compute."""
        return not (self.scheduler.running or self.scheduler.waiting)

    def add(self, generation: Generation) -> None:
        """Add a generation's sequences to the waiting ones, and begin to fetch their pages from lower tiers."""
        sequences = generation.sequences
        if sequences:
            self._generations[generation.id] = generation
            self.recall()  # the next step shall have its rows
        for sequence in sequences:
            self.scheduler.add(sequence)
            if generation.choices[sequence.choice].room <= 0:
                self.scheduler.pause(sequence)  # the choice was restored at its boundary
        self.offload.begin(sequences)
        self.wake()

    def abort(self, generation: Generation) -> None:
        """Remove a generation and free its pages at once; no planned or running step gives it another token."""
        if self._generations.get(generation.id) is generation:
            del self._generations[generation.id]
            self.recall()
        self.offload.drop([choice.sequence for choice in generation.choices])

    def pause(self, generation: Generation) -> None:
        """Plan no rows of a generation until `resume`; the running step still ends with its tokens.

        Its pages stay until other sequences need the room.
        """
        if self._generations.get(generation.id) is generation:
            self.recall()
            for sequence in generation.sequences:
                self.scheduler.pause(sequence)

    def resume(self, generation: Generation) -> None:
        """Plan rows again for the choices of a generation that are not at their boundary."""
        if self._generations.get(generation.id) is generation:
            self.recall()  # the next step shall have its rows
            for choice in generation.choices:
                if choice.finish is None and choice.room > 0:
                    self.scheduler.unpause(choice.sequence)
            self.wake()

    def rewrite(self, choice: Choice, prompt: Sequence[int], spans: Sequence[Range] = ()) -> int:
        """Give a choice another prompt, of any length; return the number of tokens that must now be computed.

        Drawn tokens stay, and the next tokens are drawn as in a generation with the new prompt, its `spans` and the
        same tokens. InternalError if a step is in flight, since it may have rows of the choice.
        """
        if self._submitted:
            raise InternalError("a prompt was rewritten while a step is in flight")
        choice.lookup = None  # it is based on the former prompt
        return self.scheduler.rewrite(choice.sequence, prompt, spans)

    def wake(self) -> None:
        """End a `wait`, since a step may find more to compute."""
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until a step may find something to compute."""
        if self.scheduler.running:
            await asyncio.sleep(0)  # the last step was empty: its only sequence lost its pages
            return
        if self.scheduler.waiting:
            seconds = min(seconds, self.offload.patience_s())
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def step(self) -> list[Progress]:
        """Compute one step, if there is anything to compute, and return the progress of its choices."""
        parts = self.plan()
        if parts is None:
            return []
        running = self.submit(parts)
        return self.commit(running, await running.handle.result())

    def plan(self) -> list[ScheduledRows] | None:
        """Schedule a step and return its parts: an empty list if only pages move; None if there is nothing to do."""
        if self._submitted:
            raise InternalError("a step was planned while another one is in flight")
        self._changed.clear()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        decoding = decoding_of(running, self.executor.shape.windows)
        prompts = prompts_beside(running, waiting, self.limits.running)
        budget = self.capacity.budget(decoding, prompts, self.limits.tokens)
        if self.homes is not None:  # what was measured of stages ends with the largest step
            budget = min(budget, self.limits.tokens)
        parts = self.scheduler.step(budget, now_s=self._clock.monotonic())
        if self.homes is not None and (self.scheduler.moves or not self._plain(parts)):
            return parts if parts or self.scheduler.moves or self.scheduler.loads else None
        lengths = self._draft_lengths(parts)
        for place, length in enumerate(lengths):
            lookup = self._choice_of(parts[place]).lookup
            if length and lookup is not None and (guesses := lookup.draft(length)):
                parts[place] = self.scheduler.guess(parts[place], guesses)
        if not any(part.guesses for part in parts):
            parts = self._extend(parts, 0)
        return parts if parts or self.scheduler.loads else None

    def _plain(self, parts: Sequence[ScheduledRows]) -> bool:
        """Return whether a step has a part of every running sequence, and needs no stages."""
        return len(parts) == len(self.scheduler.running) and not any(part.staged for part in parts)

    def _choice_of(self, part: ScheduledRows) -> Choice:
        sequence = part.sequence
        return self._generations[sequence.job].choices[sequence.choice]

    def _draft_lengths(self, parts: Sequence[ScheduledRows]) -> list[int]:
        """Return the number of tokens to guess for each part of a step; empty if it has more than a few streams."""
        if not self._lookup or not parts or not all(part.draws for part in parts):
            return []
        live = [part for part in parts if part.sequence.job in self._generations]
        choices = [self._choice_of(part) for part in live]
        if len(live) < len(parts) or len(parts) > DRAFTED:
            for choice in choices:
                choice.lookup = None
            return []
        for choice in choices:
            if choice.lookup is None:
                choice.lookup = PromptLookup(choice.sequence.tokens())
        if any(len(part.known) > 1 for part in parts):
            return []  # the last rows of a prompt: only the next step may have guesses
        windows = self.executor.shape.windows
        looks = [attended(part.sequence.length, part.sequence.length, 1, windows) for part in parts]
        size = Step(len(parts), len(parts), sum(looks))
        most = min(MOST, self.limits.tokens // len(parts) - 1)
        lengths = []
        for choice, each in zip(choices, looks, strict=True):
            assert choice.lookup is not None
            seconds = partial(self._seconds, size, each)
            lengths.append(draft_length(choice.lookup.right, min(most, choice.room - 1), seconds))
        return lengths

    def _seconds(self, size: Step, attended_each: float, more: int) -> float:
        """Return the predicted seconds of a step with `more` rows, each attending to `attended_each` tokens."""
        attends = size.attended + more * attended_each
        return self.capacity.cost.seconds(size._replace(rows=size.rows + more, attended=attends))

    def _extend(self, parts: list[ScheduledRows], before: int) -> list[ScheduledRows]:
        """Return a step's parts with as many tokens as allowed; `before` tokens of each are being drawn already."""
        if self._several < 2 or not all(part.draws and len(part.positions) == 1 for part in parts):
            return parts
        rooms = [
            self._choice_of(part).room - before
            for part in parts
            if part.sequence.job in self._generations
        ]
        if len(rooms) < len(parts):
            return parts
        windows = self.executor.shape.windows
        size = Step(
            len(parts),
            len(parts),
            sum(attended(part.positions[0], part.positions[0], 1, windows) for part in parts),
        )
        token_s = self.capacity.cost.seconds(size)
        return self.scheduler.extend(parts, tokens_at_once(token_s, self._several, rooms) - 1)

    def submit(self, parts: Sequence[ScheduledRows]) -> RunningStep:
        """Begin to execute a planned step, without sequences that have been aborted since."""
        parts = [part for part in parts if part.sequence.pages]
        generations = [self._generations[part.sequence.job] for part in parts]
        rows = [_rows(*each) for each in zip(generations, parts, strict=True)]
        moves = self.scheduler.moves
        staged = None
        if self.homes is not None and (moves or any(part.staged for part in parts)):
            staged = StagedStep(self.homes.executor, HomeMoves(moves))
        return self._submit(parts, generations, rows, self.offload.load(), staged=staged)

    def submit_ahead(self) -> bool:
        """Submit the next step while a step runs, if the next step surely draws tokens for the same sequences.

        False if nothing was submitted: a sequence waits, pages move, or a prompt is not computed yet.
        """
        if len(self._submitted) != 1:
            return False
        before = self._submitted[0]
        if before.rows is not None:
            return False  # the next step needs a plan of homes
        if before.handle.early.asked:
            return False  # the number of tokens that it draws is unknown
        if any(self._draft_lengths(before.parts)):
            return False  # the next step will have guesses, which need this step's tokens
        ending = {
            part.sequence
            for generation, part in zip(before.generations, before.parts, strict=True)
            if generation.choices[part.sequence.choice].room <= before.tokens
        }
        parts = self.scheduler.follow(before.parts, ending, now_s=self._clock.monotonic())
        if not parts:
            return False
        parts = self._extend(parts, before.tokens)
        places = {part.sequence: place for place, part in enumerate(before.parts)}
        generations = [before.generations[places[part.sequence]] for part in parts]
        rows = [
            _next_row(generation, part, before.tokens)
            for generation, part in zip(generations, parts, strict=True)
        ]
        following = Following(before.handle, [places[part.sequence] for part in parts])
        self._submit(parts, generations, rows, None, following)
        return True

    def recall(self) -> None:
        """Take back the step submitted ahead, unless it has begun; end the running step after its present token."""
        if len(self._submitted) > 1 and self._submitted[1].handle.revoke():
            self._submitted.pop()
        for step in self._submitted:
            step.handle.early.ask()

    def _submit(
        self,
        parts: list[ScheduledRows],
        generations: list[Generation],
        rows: list[SequenceInput],
        loading: PageLoads | None,
        following: Following | None = None,
        staged: StagedStep | None = None,
    ) -> RunningStep:
        size = size_of(rows, self.executor.shape.windows)
        tokens = 1 + max((part.ahead for part in parts), default=0)
        predicted_s = tokens * self.capacity.cost.seconds(size)
        if staged is not None and self.homes is not None:
            predicted_s = self.homes.latest.seconds
        due_s = sum((step.predicted_s for step in self._submitted), predicted_s)
        requests = [generation.id for generation in generations]
        handle = self._steps.submit(rows, requests, loading, due_s, following, staged)
        in_stages = None if staged is None else rows
        placing = any(each.places for each in rows)
        step = RunningStep(
            parts, generations, loading, size, predicted_s, handle, tokens, in_stages, placing
        )
        self._submitted.append(step)
        return step

    def commit(self, step: RunningStep, result: StepResult) -> list[Progress]:
        """Give the tokens of the oldest submitted step to its choices; return choices with tokens, and failures."""
        self._submitted.popleft()
        if not (result.isolated or step.rows is not None or step.placing):
            self.capacity.cost.observe(step.size, result.seconds / result.tokens)
        if self.homes is not None:
            self._learn(self.homes, step, result)
        self.offload.loaded(step.loading)
        progress = []
        for generation, part, outcome in zip(
            step.generations, step.parts, result.outcomes, strict=True
        ):
            if self._generations.get(generation.id) is not generation or not part.sequence.pages:
                continue  # aborted meanwhile, or the sequence begins again after a damaged page
            before = len(generation.choices[part.sequence.choice].tokens)
            try:
                choice = self._commit(generation, part, outcome)
            except Exception as error:  # noqa: BLE001 - the error of one generation; the others go on
                choice = None
                self._fail(generation, failure_of(error, "internal_error"))
            if outcome is not None or generation.failure is not None:
                gained = 0 if choice is None else len(choice.tokens) - before
                progress.append(Progress(generation, choice, gained))
        self.offload.ended()
        self.offload.save()
        return progress

    def _learn(self, homes: HomePlanner, step: RunningStep, result: StepResult) -> None:
        if step.rows is None:
            homes.decoded += result.tokens * sum(len(part.known) == 1 for part in step.parts)
            if not (result.isolated or step.placing):
                homes.learn_whole(step.size, result.seconds / result.tokens)
            return
        homes.count(step.rows, step.predicted_s, result.seconds, result.stages)
        if not result.isolated and step.rows:
            homes.learn(step.rows, result.stages)

    def _commit(
        self,
        generation: Generation,
        part: ScheduledRows,
        outcome: SampledToken | StepFailure | None,
    ) -> Choice | None:
        if isinstance(outcome, StepFailure):
            self._fail(generation, outcome)
            return None
        choice = generation.choices[part.sequence.choice]
        own = part._replace(positions=part.known)
        if outcome is None:
            self.scheduler.commit(own, None)
            return choice
        if part.guesses:
            self.drafted += len(part.guesses)
            self.accepted += len(outcome.then)
        for ahead, drawn in enumerate((outcome, *outcome.then)):
            row = own if ahead == 0 else own._replace(positions=[own.positions[-1] + ahead])
            self.scheduler.commit(row, choice.push(drawn))
            if choice.finish is not None:
                break
        if choice.finish is not None:
            self.offload.drop([part.sequence])
        elif choice.room <= 0:
            self.scheduler.pause(part.sequence)
        if generation.over:
            del self._generations[generation.id]
        return choice

    def _fail(self, generation: Generation, failure: StepFailure) -> None:
        generation.failure = failure
        self.abort(generation)


def tokens_at_once(token_s: float, most: int, rooms: Sequence[int]) -> int:
    """Return the number of tokens that a step gives each sequence, one after another; at least one.

    `token_s` is the seconds of one token of all sequences; `rooms` are the tokens that each sequence may still get. The
    tokens of a step are delivered together, so they take at most `SEVERAL_S` seconds.
    """
    soon = int(SEVERAL_S / max(token_s, 1e-9))
    return max(1, min(most, soon, *rooms))


def _rows(generation: Generation, part: ScheduledRows) -> SequenceInput:
    """Return the executor's input for a part of a step."""
    sequence = part.sequence
    choice, guesses = generation.choices[sequence.choice], part.guesses
    sample = choice.draw() if part.draws else None
    drafts = [choice.draw(at, guesses[:at]) for at in range(1, len(guesses) + 1)]
    ahead = [choice.draw(at) for at in range(1, part.ahead + 1)]
    # A copy: pages may be added for the next step while the executor reads this step's.
    pages = [list(held) for held in sequence.pages]
    computed, places = placed(sequence, part.known)
    tokens = [*sequence.at(computed), *guesses]
    positions = [*computed, *part.positions[len(part.known) :][: len(guesses)]]
    return SequenceInput(
        tokens, positions, pages, sample, drafts, ahead, sequence.home, part.attended, part.part,
        sequence.long, sequence.front, places,
    )  # fmt: skip


def _next_row(generation: Generation, part: ScheduledRows, before: int) -> SequenceInput:
    """Return the row of the last of the `before` tokens that the running step draws.

    The row's token is filled in when the running step has ended.
    """
    sequence = part.sequence
    pages = [list(held) for held in sequence.pages]
    choice = generation.choices[sequence.choice]
    ahead = [choice.draw(before + at) for at in range(1, part.ahead + 1)]
    return SequenceInput(
        [], part.known, pages, choice.draw(before), ahead=ahead, long=sequence.long
    )
