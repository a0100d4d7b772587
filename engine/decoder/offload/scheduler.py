"""NEO's load-aware scheduler (section 3.2): divides a step's work between device and host, in one batch or two.

`schedule` is a pure function. Batch 0 holds prompts, the device's decoding sequences and some of the host's; batch 1
holds most of the host's. While the device computes one batch's linear stages, the host attends for the other batch. A
plan of two batches is accepted only if the device never waits, by both inequalities of the paper, host_1 <= linear_0
and host_0 <= linear_1 + device_0, and only if it serves more a second than the device alone.

Decisions where the paper leaves a choice:

- The most urgent sequences come first everywhere. Where pages run out, the least urgent sequence that has been in its
  home for SETTLE steps leaves the device: to the host if the host has room, else it is recomputed later.
- A sequence that the host has skipped for PATIENCE steps moves back to the device before prompts get the room; other
  sequences move back only if no prompt waits. Both need a tenth of the device's pages to stay free, SETTLE steps in
  their home, and copies that the step hides.
- A prompt gets its home on the host if the device has no room, all its rows fit one step, and the host could attend to
  all its sequences while the device computes the linear stages of a step with this prompt; more sequences would only
  wait on the host. A prompt stays in the queue if the host's work is hidden without the prompt's linear work (the
  paper's step 5), except for one prompt a step while the host serves all its sequences. No prompt goes to the host
  while a sequence there has been skipped for PATIENCE steps.
- A new prompt whose pages only the host has gets the cheapest resumption (`resume.py`, not in the paper): a home on the
  host, with its pages attended in place, or a home on the device, to which pages are fetched or where they are
  recomputed. A home on the host requires that the host could attend to all its sequences, as above, or that no other
  sequence runs.
- Where a sequence may have a front on the host (not in the paper), a prompt's history may stay there as a front, by the
  price of the step. A sequence on the device that must make room leaves the host only a front, if that frees enough and
  the device's attention hides the host's; it gets the front back when the device has ample room, no prompt waits, and
  the step hides the copies. It has a row in every step.
- Where a step in stages takes longer than one in one piece (on CUDA that is a graph), which the paper does not count,
  the host gets new sequences only if steps in stages still serve more a second; the device alone works in one piece.
- Shared pages are free once the last holder has left, and are copied once if several holders move in the same step.
- The host's sequences are packed twice, the longest skipped first and the shortest first, into batch 1 before batch 0;
  and once into batch 0 only, which needs no second reading of the weights (not in the paper). The best plan wins.
- A sequence is skipped in at most STARVED - 1 steps in a row. If no plan that serves the due sequences satisfies the
  inequalities, one batch serves them, and the device waits for the host.
- The value of a plan is its decode rows, plus the computed share of each prompt, divided by its seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.cost.linear import LinearCost
from common.pages.identity import PAGE
from engine.decoder.executor.interface import LocalTier
from engine.decoder.offload.costs import OffloadCosts
from engine.decoder.offload.plan import (
    SETTLE,
    Choice,
    DecodeState,
    HomeMove,
    OffloadLimits,
    OffloadMode,
    OffloadPlan,
    OffloadState,
    PromptChunk,
    PromptState,
    Resume,
    StageTimes,
    SubBatch,
    pages_of,
)
from engine.decoder.offload.resume import ResumeFits, StepWork, choose_resume, staged_s

PATIENCE = 8  # after as many skipped steps a sequence may take room on the device before prompts
STARVED = 32  # every decoding sequence has a row at least once in this many steps
RESERVE = 0.1  # share of each pool kept for running sequences to grow into

_ALL_ON_HOST = (OffloadMode.SIMPLE, OffloadMode.FULL)


class _Attended(NamedTuple):
    """Decoding sequences that are attended to together: their number, and their tokens in all."""

    sequences: int = 0
    tokens: int = 0


def _attended(sequences: Iterable[DecodeState]) -> _Attended:
    lengths = [sequence.own for sequence in sequences]
    return _Attended(len(lengths), sum(lengths))


class _Placed(NamedTuple):
    """A prompt's rows in this step, its home, the tier that attends, and the use of its history on the host."""

    prompt: PromptState
    rows: int
    home: LocalTier
    attended: LocalTier = "device"
    resume: Resume | None = None

    @property
    def pages(self) -> int:
        """The number of free pages taken in the home, including found pages on the host that no sequence held."""
        prompt = self.prompt
        if self.home == "device":
            return prompt.missing(self.rows)
        # Pages found on the device are copied to a home on the host, so they take pages there, too.
        return prompt.wanted_on_host + prompt.history.idle

    @property
    def copied(self) -> int:
        """The number of pages copied between the tiers, beside the step."""
        prompt = self.prompt
        if self.home == "device":
            return prompt.history.later if prompt.front else prompt.history.fetched
        return prompt.history.copied if self.attended == "host" else prompt.wanted_on_host

    @property
    def chunk(self) -> PromptChunk:
        whole = self.rows == self.prompt.rows
        return PromptChunk(
            self.prompt.order, self.rows, self.home, whole, self.pages, self.copied, self.attended,
            self.resume, self.prompt.front,
        )  # fmt: skip


@dataclass
class _Departures:
    """Shared pages while sequences leave their homes one by one: `left` counts leavers, `sent` are copied pages."""

    left: Counter[tuple[LocalTier, int]] = field(default_factory=Counter)
    sent: set[tuple[LocalTier, int]] = field(default_factory=set)

    def copied(self, sequence: DecodeState) -> int:
        """Return the number of pages to copy if a sequence moves now."""
        sent = sum(
            not page.copied and (sequence.home, page.page) in self.sent for page in sequence.shared
        )
        return sequence.pages - sequence.copies - sent

    def leaves(self, sequence: DecodeState, *, moves: bool) -> int:
        """Record that a sequence leaves its home, for the other one if it `moves`; return the number of freed pages."""
        freed = sequence.pages - sequence.front - sequence.passed - len(sequence.shared)
        for page in sequence.shared:
            key = sequence.home, page.page
            self.left[key] += 1
            freed += self.left[key] == page.holders
            if moves:
                self.sent.add(key)
        return freed


class _Split(NamedTuple):
    """The host's sequences in both batches, and the number of sequences examined to choose them."""

    first: Sequence[DecodeState] = ()
    second: Sequence[DecodeState] = ()
    examined: int = 0


_ALONE = _Split()


@dataclass
class _Draft:
    """A step during planning: the decisions made so far, and the free pages left in both tiers."""

    costs: OffloadCosts
    limits: OffloadLimits
    device_free: int
    host_free: int
    device: list[DecodeState]
    host: list[DecodeState]
    prompts: list[_Placed] = field(default_factory=list)
    moves: list[HomeMove] = field(default_factory=list)
    preempt: list[int] = field(default_factory=list)
    moving: list[DecodeState] = field(default_factory=list)  # to the host: no row in this step
    departures: _Departures = field(default_factory=_Departures)

    @property
    def rows(self) -> int:
        """The number of rows of batch 0, without the host's sequences."""
        return len(self.device) + sum(placed.rows for placed in self.prompts)

    def device_s(self) -> float:
        """Return the seconds of one layer's attention on the device: batch 0's decode rows and prompts."""
        own = [placed for placed in self.prompts if placed.attended == "device"]
        pairs = sum(
            placed.prompt.pairs(placed.rows) - placed.prompt.front_pairs(placed.rows)
            for placed in own
        )
        decode = self.costs.device_s(*_attended(self.device))
        coming_s = sum(staged_s(p.prompt, self.costs) for p in own if p.home == "host")
        return decode + self.costs.prefill_s(len(own), pairs) + coming_s

    def in_place(self) -> _Attended:
        """Return batch 0's rows for which the host attends anyway, and their number of (row, attended token) pairs.

        These are rows of prompts, and all rows with a front.
        """
        there = [placed for placed in self.prompts if placed.attended == "host"]
        split = [placed for placed in self.prompts if placed.prompt.front]
        decoding = [each.front for each in self.device if each.front]
        pairs = sum(placed.prompt.pairs(placed.rows) for placed in there)
        pairs += sum(placed.prompt.front_pairs(placed.rows) for placed in split)
        rows = sum(placed.rows for placed in (*there, *split)) + len(decoding)
        return _Attended(rows, pairs + PAGE * sum(decoding))

    def copies(self) -> int:
        """Return the number of pages copied between the tiers."""
        bound = sum(placed.copied for placed in self.prompts)
        return bound + sum(move.pages for move in self.moves)

    def copy_s(self) -> float:
        """Return the seconds of all copies between the tiers."""
        return self.costs.page_s * self.copies()

    def times(self, split: _Split) -> StageTimes:
        """Return the seconds of a layer's stages; the `split` may have one or two batches of host sequences."""
        first, second, prompts = _attended(split.first), _attended(split.second), self.in_place()
        linear = self.costs.linear.seconds
        on_host = first.sequences + prompts.sequences, first.tokens + prompts.tokens
        return StageTimes(
            (linear(self.rows + first.sequences), linear(second.sequences)),
            (self.device_s(), 0.0),
            (self.costs.host_s(*on_host), self.costs.host_s(*second)),
        )

    def step_s(self, layer_s: float) -> float:
        """Return the seconds of a step; copies run beside its layers."""
        return self.costs.step_s + max(self.costs.layers * layer_s, self.copy_s())

    def served(self, decoding: int) -> float:
        """Return the decode rows of a step plus the computed share of each prompt."""
        return decoding + sum(placed.rows / placed.prompt.rows for placed in self.prompts)

    def plan(self, split: _Split, times: StageTimes, layer_s: float, why: Choice) -> OffloadPlan:
        """Return the plan of batch 0 and, if it is not empty, batch 1."""
        first = SubBatch(
            tuple(placed.chunk for placed in self.prompts),
            tuple(sequence.order for sequence in self.device),
            tuple(sequence.order for sequence in split.first),
        )
        second = SubBatch(host=tuple(sequence.order for sequence in split.second))
        batches = tuple(batch for batch in (first, second) if batch.rows)
        decoding = len(self.device) + len(split.first) + len(split.second)
        seconds = self.step_s(layer_s) if batches or self.moves else 0.0
        plan = OffloadPlan(
            batches, tuple(self.moves), tuple(self.preempt), times, seconds, self.served(decoding),
            why if batches else "nothing",
        )  # fmt: skip
        if not plan.whole:
            return plan
        return plan._replace(seconds=self.costs.whole_s(*_attended(self.device), seconds))

    def overlapped(self, split: _Split, why: Choice) -> OffloadPlan:
        """Return the plan of batches with overlapping stages."""
        times = self.times(split)
        if why in ("device only", "host beside device", "two batches") and times.host[0] > 0:
            if times.short_slack_s < 0:
                why = "in place"  # packing keeps the inequality, unless prompts alone exceed it
            elif why == "device only":
                why = "host beside device"
        return self.plan(split, times, times.layer_s, why)


def schedule(
    state: OffloadState,
    limits: OffloadLimits,
    costs: OffloadCosts,
    mode: OffloadMode = OffloadMode.ASYMMETRIC,
) -> OffloadPlan:
    """Plan a step; the plan has work if there is any work.

    Each sequence at its longest must fit the device alone (in `simple` and `full`: the host, and its prompt one step).
    ValueError if a step may have fewer rows than sequences.
    """
    if limits.tokens < limits.running:
        raise ValueError(
            f"a step of {limits.tokens} rows is too small for {limits.running} sequences"
        )
    draft = _Draft(
        costs, limits, state.device.free, state.host.free,
        [each for each in state.decoding if each.home == "device"],
        [each for each in state.decoding if each.home == "host"],
    )  # fmt: skip
    uses_host = mode is not OffloadMode.DEVICE
    _grow_host(draft)
    running = _make_room(draft, state, uses_host=uses_host)
    if mode not in _ALL_ON_HOST:
        _bring_back(draft, state)
    _place_prompts(draft, state, running, mode)
    if mode is OffloadMode.ASYMMETRIC:
        return _balanced(draft)
    return _fixed(draft, mode)


# -- pages: growth, homes and prompts ------------------------------------------------------------------


def _grow_host(draft: _Draft) -> None:
    """Reserve pages for the next row of every sequence on the host; without enough, the least urgent lose theirs."""
    while draft.host and sum(each.grows for each in draft.host) > draft.host_free:
        victim = draft.host.pop()
        draft.preempt.append(victim.order)
        draft.host_free += draft.departures.leaves(victim, moves=False)
    draft.host_free -= sum(each.grows for each in draft.host)


def _make_room(draft: _Draft, state: OffloadState, *, uses_host: bool) -> list[PromptState]:
    """Reserve pages for the device's next rows; return the running prompts that continue."""
    running = [prompt for prompt in state.prompts if prompt.running]
    spare = _spare_rows(draft, state)

    def wanted() -> int:
        left, pages = spare, sum(each.grows for each in draft.device)
        for prompt in running:
            pages += prompt.missing(min(left, prompt.rows))
            left -= min(left, prompt.rows)
        return pages

    while wanted() > draft.device_free and len(draft.device) + len(running) > 1:
        settled = [each for each in draft.device if each.settled >= SETTLE]
        victim = next(reversed(settled or draft.device), None)
        if victim is None or (running and running[-1].order > victim.order):
            prompt = running.pop()
            draft.preempt.append(prompt.order)
            draft.device_free += prompt.pages
            continue
        if front := _front_to_leave(draft, victim, wanted() - draft.device_free):
            _leave_front(draft, victim, front)
            continue
        draft.device.remove(victim)
        missing = draft.departures.copied(victim)
        moves = uses_host and missing <= draft.host_free and _stages_pay(draft, state)
        draft.device_free += draft.departures.leaves(victim, moves=moves)
        if moves:
            draft.host_free -= missing
            draft.moves.append(HomeMove(victim.order, "host", missing))
            draft.moving.append(victim)
        else:
            draft.preempt.append(victim.order)
    draft.device_free -= sum(each.grows for each in draft.device)
    return running


def _front_to_leave(draft: _Draft, sequence: DecodeState, lacking: int) -> int:
    """Return the number of first pages that a sequence leaves to the host to free `lacking` pages; 0: it leaves wholly.

    It keeps its row in every step, so the device's attention must hide that of the host to all fronts.
    """
    chunk = draft.limits.chunk
    if not chunk or sequence.front or sequence.settled < SETTLE:
        return 0
    # Pages that others hold may be any of the first, and are not free when this sequence leaves them.
    front = -(-(lacking + len(sequence.shared)) // chunk) * chunk
    if front > min((sequence.length - 1) // PAGE, draft.host_free):
        return 0
    device_s = draft.device_s() - draft.costs.device_s(*_attended(draft.device))
    others = [each for each in draft.device if each.order != sequence.order]
    device_s += draft.costs.device_s(*_attended([*others, sequence._replace(front=front)]))
    there = draft.in_place()
    host_s = draft.costs.host_s(there.sequences + 1, there.tokens + front * PAGE)
    return front if host_s <= device_s else 0


def _leave_front(draft: _Draft, sequence: DecodeState, front: int) -> None:
    """Let a sequence on the device leave its first pages to the host."""
    _replace(draft, sequence._replace(front=front))
    draft.device_free += front - len(sequence.shared)
    draft.host_free -= front
    draft.moves.append(HomeMove(sequence.order, "device", front, front))


def _replace(draft: _Draft, sequence: DecodeState) -> None:
    """Replace a sequence on the device, at its place in the order of urgency."""
    draft.device = [sequence if each.order == sequence.order else each for each in draft.device]


def _spare_rows(draft: _Draft, state: OffloadState) -> int:
    """Return the number of rows left for prompts if every decoding sequence has one."""
    return max(0, draft.limits.tokens - len(state.decoding))


def _bring_back(draft: _Draft, state: OffloadState) -> None:
    """Move sequences from the host to the device if it has ample room."""
    if draft.moves or draft.preempt:
        return
    settled = [each for each in draft.host if each.settled >= SETTLE]
    waiting = sorted(
        (each for each in settled if each.skipped >= PATIENCE), key=lambda each: -each.skipped
    )
    if not state.prompts:
        waiting += [each for each in settled if each.skipped < PATIENCE]
    promised = sum(prompt.missing(prompt.rows) for prompt in state.prompts if prompt.running)
    room = draft.device_free - promised - int(RESERVE * state.device.total)
    hidden_s = draft.costs.layers * draft.times(_ALONE).layer_s
    for sequence in waiting:
        copied = draft.departures.copied(sequence)
        if copied + sequence.grows > room:
            continue
        if draft.moves and draft.copy_s() + copied * draft.costs.page_s > hidden_s:
            break
        room -= copied + sequence.grows
        draft.device_free -= copied + sequence.grows
        draft.host_free += draft.departures.leaves(sequence, moves=True) + sequence.grows
        draft.moves.append(HomeMove(sequence.order, "device", copied))
        draft.host.remove(sequence)
        draft.device.append(sequence)
    if state.prompts:
        return
    for sequence in [each for each in draft.device if each.front and each.settled >= SETTLE]:
        copy_s = draft.copy_s() + sequence.front * draft.costs.page_s
        if sequence.front <= room and copy_s <= hidden_s:
            room -= sequence.front
            draft.device_free -= sequence.front
            draft.moves.append(HomeMove(sequence.order, "device", sequence.front))
            _replace(draft, sequence._replace(front=0))


def _place_prompts(
    draft: _Draft, state: OffloadState, running: Sequence[PromptState], mode: OffloadMode
) -> None:
    """Add prompts to batch 0 in order: running ones, then new ones, at home on the device or else on the host."""
    budget = _spare_rows(draft, state)
    promised = 0
    for prompt in running:
        rows = _affordable(
            prompt, _bounded(draft, prompt, min(budget, prompt.rows)), draft.device_free
        )
        if rows:
            draft.prompts.append(_Placed(prompt, rows, "device"))
            draft.device_free -= prompt.missing(rows)
            budget -= rows
        promised += prompt.missing(prompt.rows) - prompt.missing(rows)
    if draft.preempt:
        return
    held = len(draft.device) + len(draft.host) + len(draft.moving) + len(running)
    for prompt in state.prompts:
        if prompt.running:
            continue
        if budget <= 0 or held >= draft.limits.running:
            break
        placed = _place(draft, state, prompt, budget, promised, mode)
        if placed is None:
            break
        draft.prompts.append(placed)
        budget -= placed.rows
        held += 1
        if placed.home == "host":
            draft.host_free -= placed.pages
        else:
            draft.host_free -= placed.prompt.history.front_idle if placed.prompt.front else 0
            draft.device_free -= placed.pages
            promised += placed.prompt.missing(placed.prompt.rows) - placed.pages


def _place(
    draft: _Draft,
    state: OffloadState,
    prompt: PromptState,
    budget: int,
    promised: int,
    mode: OffloadMode,
) -> _Placed | None:
    """Return a new prompt's rows and home; None if it must wait."""
    alone = not (draft.device or draft.prompts or draft.moves)
    on_device = mode not in _ALL_ON_HOST and _fits_device(draft, state, prompt, promised, alone)
    fetched = bool(prompt.history.fetched)
    if fetched and mode is OffloadMode.ASYMMETRIC:
        split = _fits_split(draft, state, prompt, promised, alone)
        return _resumed(draft, state, prompt, budget, ResumeFits(on_device, split=split), alone)
    rows = _bounded(draft, prompt, min(budget, prompt.rows))
    if not rows:
        return None
    if on_device:
        return _Placed(prompt, rows, "device", resume="fetch" if fetched else None)
    if mode is OffloadMode.DEVICE or rows < prompt.rows:
        return None
    placed = _Placed(prompt, rows, "host", resume="attend" if fetched else None)
    if not _fits_host(draft, state, placed, alone):
        return None
    if mode is not OffloadMode.ASYMMETRIC:
        return placed
    return placed if _covered(draft, state, prompt) else None


def _fits_device(
    draft: _Draft, state: OffloadState, prompt: PromptState, promised: int, alone: bool
) -> bool:
    """Return whether the device has room for a prompt beside the running prompts and the reserve for growth."""
    needs, room = prompt.missing(prompt.rows), draft.device_free - promised
    kept = any(move.to == "host" or move.front for move in draft.moves)
    if needs + int(RESERVE * state.device.total) <= room and not kept:
        return True
    return alone and needs <= room and not draft.host


def _fits_split(
    draft: _Draft, state: OffloadState, prompt: PromptState, promised: int, alone: bool
) -> bool:
    """Return whether a prompt may have its front on the host: both tiers have room, and the host could attend to it."""
    history, lonely = prompt.history, _lonely(draft, alone)
    if not history.front or not (lonely or _covered(draft, state, prompt.split)):
        return False
    spare = draft.host_free - history.front_idle
    there = spare >= int(RESERVE * state.host.total) or (lonely and spare >= 0)
    return there and _fits_device(draft, state, prompt.split, promised, alone)


def _fits_host(draft: _Draft, state: OffloadState, placed: _Placed, alone: bool) -> bool:
    """Return whether the host has room for a prompt beside the reserve for growth."""
    spare = draft.host_free - placed.pages
    return spare >= int(RESERVE * state.host.total) or (alone and not draft.host and spare >= 0)


def _resumed(
    draft: _Draft,
    state: OffloadState,
    prompt: PromptState,
    budget: int,
    room: ResumeFits,
    alone: bool,
) -> _Placed | None:
    """Return the placement of a prompt whose pages only the host has; None if it must wait.

    `room` tells whether it fits the device, and whether it fits both tiers.
    """
    lonely = _lonely(draft, alone)
    whole = prompt.rows <= budget and (lonely or _covered(draft, state, prompt))
    tiers: tuple[LocalTier, LocalTier] = ("device", "host")
    there = [_Placed(prompt, prompt.rows, "host", tier, "attend") for tier in tiers]
    attending = frozenset(
        each.attended
        for each in there
        if whole and _fits_host(draft, state, each, alone) and _in_time(draft, each)
    )
    beside = StepWork(
        draft.rows, draft.device_s(), draft.costs.host_s(*draft.in_place()), draft.copies()
    )
    fits = room._replace(attending=attending, hidden=not lonely)
    chosen = choose_resume(prompt, beside, fits, draft.costs)
    if chosen is None:
        return None
    if chosen.use == "attend":
        return _Placed(prompt, prompt.rows, "host", chosen.attended, "attend")
    forms = {"fetch": prompt, "split": prompt.split}
    taken = forms.get(chosen.use, prompt.anew)
    rows = _bounded(draft, taken, min(budget, taken.rows))
    return _Placed(taken, rows, "device", resume=chosen.use) if rows else None


def _in_time(draft: _Draft, placed: _Placed) -> bool:
    """Return whether the step with this prompt stays within `step_s`; a first prompt of at most a page always may."""
    if draft.limits.step_s == float("inf") or (placed.rows <= PAGE and not draft.prompts):
        return True
    draft.prompts.append(placed)
    within = draft.step_s(draft.times(_ALONE).layer_s) <= draft.limits.step_s
    draft.prompts.pop()
    return within


def _lonely(draft: _Draft, alone: bool) -> bool:
    """Return whether nothing else runs, so that the host may attend unhidden, where its stages cost nothing more."""
    return alone and not draft.host and draft.costs.whole is None


def _covered(draft: _Draft, state: OffloadState, prompt: PromptState) -> bool:
    """Return whether the host could attend to all its sequences and this prompt's within one linear stage, and pays."""
    if any(each.skipped >= PATIENCE for each in draft.host) or not _stages_pay(draft, state):
        return False
    bound = [placed.prompt for placed in draft.prompts if placed.home == "host"]
    rows = draft.rows - sum(each.rows for each in bound) + prompt.rows
    held = [each.length for each in (*draft.host, *draft.moving)]
    held += [PAGE * each.front for each in draft.device if each.front]
    held += [PAGE * placed.prompt.front for placed in draft.prompts if placed.prompt.front]
    held += [each.length for each in bound]
    held.append(PAGE * prompt.front or prompt.length)
    return draft.costs.host_s(len(held), sum(held)) <= draft.costs.linear.seconds(rows)


def _stages_pay(draft: _Draft, state: OffloadState) -> bool:
    """Return whether steps in stages serve more a second than the device alone once all prompts decode.

    The host gets as many of its sequences and of the prompts without a home as the device hides. True where a step in
    stages takes no longer than one in one piece; False if the device has nothing to decode.
    """
    if draft.costs.whole is None:
        return True
    at_home = {placed.prompt.order for placed in draft.prompts if placed.home == "device"}
    device, host = list(draft.device), [*draft.host, *draft.moving]
    for prompt in state.prompts:
        on_device = prompt.running or prompt.order in at_home
        decoding = DecodeState(prompt.order, "device" if on_device else "host", prompt.length, 0)
        (device if on_device else host).append(decoding)
    later = _Draft(draft.costs, draft.limits, 0, 0, device, host)
    both = later.overlapped(_pack(later, host), "two batches")
    return bool(device) and both.throughput > later.overlapped(_ALONE, "device only").throughput


def _affordable(prompt: PromptState, rows: int, pages: int) -> int:
    """Return the number of a prompt's rows, at most `rows`, for which `pages` new pages suffice."""
    while rows and prompt.missing(rows) > pages:
        rows = max(0, rows - PAGE)
    return rows


def _bounded(draft: _Draft, prompt: PromptState, rows: int) -> int:
    """Return the number of a prompt's rows that keep the step within `step_s`; for a first prompt at least a page."""
    if draft.limits.step_s == float("inf") or not rows:
        return rows
    least = 0 if draft.prompts else min(rows, PAGE)

    def keeps(count: int) -> bool:
        draft.prompts.append(_Placed(prompt, count, "device"))
        within = draft.step_s(draft.times(_ALONE).layer_s) <= draft.limits.step_s
        draft.prompts.pop()
        return within

    low, high = least, rows + 1  # `low` rows are allowed, `high` rows are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


# -- batches -------------------------------------------------------------------------------------------


def _balanced(draft: _Draft) -> OffloadPlan:
    """Return the best plan that keeps the inequalities and serves all due sequences, or else the overdue plan."""
    by_wait = sorted(draft.host, key=lambda each: -each.skipped)
    two = _pack(draft, by_wait)
    _hold_back(draft, two)
    splits: list[tuple[_Split, Choice]] = [(two, "two batches")]
    examined = two.examined
    if len(two.first) + len(two.second) < len(draft.host):
        shortest = _pack(
            draft, sorted(draft.host, key=lambda each: (each.skipped < PATIENCE, each.length))
        )
        beside = _pack(draft, by_wait, beside=True)
        splits += [(shortest, "two batches"), (beside, "host beside device")]
        examined += shortest.examined + beside.examined
    elif two.second:
        beside = _pack(draft, by_wait, beside=True)
        splits.append((beside, "host beside device"))
        examined += beside.examined
    alone = draft.overlapped(_ALONE, "device only")
    due = [each for each in draft.host if each.skipped >= STARVED - 1]
    if not alone.batches:
        due = due or draft.host
    found = [draft.overlapped(_Split(due), "overdue") if due else alone]
    longest_s = max(draft.limits.step_s, alone.seconds)
    for split, why in splits:
        chosen = {each.order for each in (*split.first, *split.second)}
        if chosen and all(each.order in chosen for each in due):
            plan = draft.overlapped(split, why if split.second else "host beside device")
            found += [plan] if plan.seconds <= longest_s else []
    best = max(found, key=lambda plan: plan.throughput)
    if best.throughput < alone.throughput:
        best = best._replace(why="overdue")
    return best._replace(device_only=alone.throughput, examined=examined)


def _pack(draft: _Draft, hosts: Iterable[DecodeState], *, beside: bool = False) -> _Split:
    """Put the host's sequences into batch 1, else batch 0, while the inequalities hold; `beside`: only into batch 0.

    A sequence added to one batch never violates the other batch's inequality, since linear work only grows.
    """
    linear, host, way = draft.costs.linear.seconds, draft.costs.host, draft.costs.exchange
    rows, device_s, prompts = draft.rows, draft.device_s(), draft.in_place()
    first, second = list[DecodeState](), list[DecodeState]()
    tokens = [prompts.tokens, 0]
    long_s = 0.0 if beside else linear(rows)
    short_s, examined = device_s, 0
    for each in hosts:
        examined += 1
        if _host_s(host, way, len(second) + 1, tokens[1] + each.length) <= long_s:
            second.append(each)
            tokens[1] += each.length
            short_s = linear(len(second)) + device_s
        elif (
            _host_s(host, way, prompts.sequences + len(first) + 1, tokens[0] + each.length)
            <= short_s
        ):
            first.append(each)
            tokens[0] += each.length
            long_s = 0.0 if beside else linear(rows + len(first))
    return _Split(first, second, examined)


def _host_s(host: LinearCost, way: LinearCost, sequences: int, tokens: int) -> float:
    """Return `OffloadCosts.host_s` for at least one sequence, by the same sum in the same order, but faster."""
    attends = host.beta_s + host.alpha_items_s * sequences + host.alpha_tokens_s * tokens
    return attends + (way.beta_s + way.alpha_items_s * sequences)


def _hold_back(draft: _Draft, split: _Split) -> None:
    """Drop prompts bound for the host from the step if the host's work is hidden without them (the paper's step 5)."""
    bound = [placed for placed in draft.prompts if placed.home == "host" and not placed.resume]
    if len(split.first) + len(split.second) == len(draft.host):
        bound = bound[1:]
    for placed in reversed(bound):
        kept = list(draft.prompts)
        draft.prompts.remove(placed)
        times = draft.times(split)
        others = draft.device or draft.prompts or split.first or split.second
        if not others or times.long_slack_s < 0 or times.short_slack_s < 0:
            draft.prompts = kept
            break


def _fixed(draft: _Draft, mode: OffloadMode) -> OffloadPlan:
    """Return the plan of a mode without a choice."""
    if mode is OffloadMode.DEVICE:
        return draft.overlapped(_ALONE, "fixed")
    if mode is OffloadMode.SIMPLE:
        split = _Split(draft.host)
        times = draft.times(split)
        return draft.plan(split, times, times.serial_s, "fixed")
    if mode is OffloadMode.SWAP:
        return _swapped(draft)
    split = _halves(draft.host)
    times = draft.times(split)
    if mode is OffloadMode.FULL:
        return draft.plan(split, times, times.layer_s, "fixed")
    return _symmetric(draft, split)


def _halves(sequences: Sequence[DecodeState]) -> _Split:
    """Deal sequences to two batches, each to the batch with fewer tokens."""
    first, second = list[DecodeState](), list[DecodeState]()
    tokens = [0, 0]
    for each in sorted(sequences, key=lambda each: -each.length):
        lighter = int(tokens[1] < tokens[0])
        (first, second)[lighter].append(each)
        tokens[lighter] += each.length
    return _Split(first, second)


def _symmetric(draft: _Draft, split: _Split) -> OffloadPlan:
    """Return the plan of two batches, each with half of the device's sequences and half of the host's."""
    if not split.first:
        return draft.overlapped(_ALONE, "fixed")
    device = _halves(draft.device)
    pairs = sum(placed.prompt.pairs(placed.rows) for placed in draft.prompts)
    prompts = sum(placed.rows for placed in draft.prompts)
    costs, linear = draft.costs, draft.costs.linear.seconds
    prefill_s = costs.prefill_s(len(draft.prompts), pairs)
    times = StageTimes(
        (linear(prompts + len(device.first) + len(split.first)), linear(len(device.second) + len(split.second))),
        (costs.device_s(*_attended(device.first)) + prefill_s, costs.device_s(*_attended(device.second))),
        (costs.host_s(*_attended(split.first)), costs.host_s(*_attended(split.second))),
    )  # fmt: skip
    plan = draft.plan(split, times, times.layer_s, "fixed")
    halves = [
        SubBatch(batch, tuple(e.order for e in on_device), tuple(e.order for e in on_host))
        for batch, on_device, on_host in (
            (plan.batches[0].prompts, device.first, split.first),
            ((), device.second, split.second),
        )
    ]
    return plan._replace(batches=tuple(half for half in halves if half.rows))


def _swapped(draft: _Draft) -> OffloadPlan:
    """Return the plan of one batch, with as many pages copied from the host as the step hides."""
    costs, own = draft.costs, _attended(draft.device)
    taken, tokens, pages = list[DecodeState](), own.tokens, 0
    base_s, times = draft.device_s() - costs.device_s(*own), draft.times(_ALONE)
    for each in sorted(draft.host, key=lambda each: -each.skipped):
        rows = draft.rows + len(taken) + 1
        attends = costs.device_s(own.sequences + len(taken) + 1, tokens + each.length)
        found = StageTimes((costs.linear.seconds(rows), 0.0), (base_s + attends, 0.0))
        comes_s = costs.page_s * (pages + pages_of(each.length))
        due = each.skipped >= STARVED - 1 or not (draft.rows or taken)
        if comes_s + draft.copy_s() > costs.layers * found.layer_s and not due:
            continue
        taken.append(each)
        tokens, pages, times = tokens + each.length, pages + pages_of(each.length), found
    comes_s = (costs.page_s * pages + draft.copy_s()) / costs.layers
    return draft.plan(_Split(taken), times, max(times.layer_s, comes_s), "fixed")
