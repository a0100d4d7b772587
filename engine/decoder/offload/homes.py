"""The home planner: turns a running engine's sequences into the plain input of plans, and plans back to sequences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from common.cost.step import Step
from common.pages.identity import CHUNK, PAGE
from engine.decoder.executor.interface import LocalTier, SequenceInput, StagedExecutor, StageTime
from engine.decoder.kv.host_matches import front_on_host, stands_on_host
from engine.decoder.kv.page_table import PageTable, PrefixMatch, computed_soon
from engine.decoder.offload.computed_step import ComputedStep
from engine.decoder.offload.costs import OffloadProfile
from engine.decoder.offload.plan import (
    NO_HISTORY,
    DecodeState,
    HostHistory,
    OffloadLimits,
    OffloadMode,
    OffloadPlan,
    OffloadState,
    PoolState,
    PromptState,
    Resume,
    pages_of,
)
from engine.decoder.offload.scheduler import schedule
from engine.decoder.sequence import TokenSequence

TIERS: tuple[LocalTier, LocalTier] = ("device", "host")
_ALL_ON_HOST = (OffloadMode.SIMPLE, OffloadMode.FULL)


class PlacedRows(NamedTuple):
    """The next `rows` rows of a sequence, its home in this step, the tier that attends, and the sub-batch.

    `resume` is the use of a new sequence's pages that only the host has. The first `front` of these stay there.
    """

    sequence: TokenSequence
    rows: int
    home: LocalTier
    attended: LocalTier
    part: int
    resume: Resume | None = None
    front: int = 0


class HomePlan(NamedTuple):
    """The plan of one step: sequences that lose their pages, changes of home and front, and rows, also of new ones."""

    preempt: list[TokenSequence]
    moves: list[tuple[TokenSequence, LocalTier, int]]
    rows: list[PlacedRows]


class HomePlanner:
    """Plans steps of sequences at home on the device or on the host, and learns costs from computed steps.

    `latest` is the last plan. `decoded` counts all decode rows so far, `on_host` those attended on the host, `on_both`
    those attended over both tiers. `choices` counts plans by reason. `predicted_s` and `measured_s` are the total
    seconds of steps in stages, `idle_s` the total seconds in which a side computed nothing between a step's first and
    last stage. `slack_s` are the latest two-batch plan's seconds between the host's end and the device's later end in
    both halves of a layer; `computed` is the latest step in stages. `resumed` counts sequences by the use of pages that
    only the host had, `host_pages` the pages with which sequences got a home on the host, by their origin.
    """

    def __init__(
        self,
        executor: StagedExecutor,
        profile: OffloadProfile,
        mode: OffloadMode = OffloadMode.ASYMMETRIC,
        *,
        step_s: float = math.inf,
        split: bool = False,
    ) -> None:
        """`step_s` is the longest predicted step (see `OffloadLimits`).

        With `split` sequences may have a front on the host, in asymmetric mode and for models without windows.
        """
        self.executor, self.profile, self.mode = executor, profile, mode
        self.split = split
        self.latest = OffloadPlan()
        self.on_host = self.on_both = self.decoded = 0
        self.choices: Counter[str] = Counter()
        self.predicted_s = self.measured_s = 0.0
        self.slack_s = (0.0, 0.0)
        self.idle_s: dict[LocalTier, float] = dict.fromkeys(TIERS, 0.0)
        self.computed: ComputedStep | None = None
        self.resumed: Counter[Resume] = Counter()
        self.host_pages: Counter[str] = Counter()
        self._step_s = step_s

    def fits(self, sequence: TokenSequence, pages: int, host_pages: int, tokens: int) -> bool:
        """True if a sequence, at its longest and alone, fits the pools, and a step of `tokens` rows where needed."""
        if self.mode in _ALL_ON_HOST:
            return pages_of(sequence.most) <= host_pages and sequence.most <= tokens
        return pages_of(sequence.most) <= pages

    def plan(
        self,
        running: Sequence[TokenSequence],
        waiting: Sequence[TokenSequence],
        table: PageTable,
        tokens: int,
        most_running: int,
    ) -> HomePlan:
        """Plan the next step of `running` and `waiting`, both in order of urgency, without changing a sequence."""
        sequences = list(running)
        self.host_pages = table.tiers.homes.counts
        # The pages that a sequence frees when it leaves are computed only for tiers whose pages may run out.
        ample = len(running) + pages_of(tokens)
        pressed: dict[LocalTier, bool] = {
            tier: table.windowed or table.available(tier) < ample for tier in TIERS
        }
        decoding = tuple(
            _decode_state(number, sequence, table, pressed=pressed[sequence.home])
            for number, sequence in enumerate(running)
            if sequence.decodes
        )
        splits = self.split and self.mode is OffloadMode.ASYMMETRIC and not table.windowed
        prompts = [
            PromptState(
                number, tuple(sequence.todo), _held(sequence), running=True, front=sequence.front
            )
            for number, sequence in enumerate(running)
            if not sequence.decodes
        ]
        for sequence, match in _ready(running, waiting, table, tokens, most_running):
            state = _prompt_state(len(sequences), sequence, match, table, splits=splits)
            prompts.append(state)
            sequences.append(sequence)
        device, host = (
            PoolState(min(pool.total for pool in table.tiers.pools(tier)), table.available(tier))
            for tier in TIERS
        )
        queues = OffloadState(tuple(prompts), decoding, device, host)
        limits = OffloadLimits(
            max(tokens, most_running), most_running, self._step_s, CHUNK if splits else 0
        )
        costs, link = self.profile.costs, self.executor.helper_link
        costs = costs if link is None else costs.over(link)
        plan = self.latest = schedule(queues, limits, costs, self.mode)
        self.choices[plan.why] += 1
        if len(plan.batches) > 1:
            self.slack_s = plan.times.long_slack_s, plan.times.short_slack_s
        on_host: LocalTier = "device" if self.mode is OffloadMode.SWAP else "host"
        rows = []
        for part, batch in enumerate(plan.batches):
            for chunk in batch.prompts:
                sequence = sequences[chunk.order]
                placed = chunk.home, chunk.attended, part, chunk.resume, chunk.front
                rows.append(PlacedRows(sequence, chunk.rows, *placed))
            rows += [PlacedRows(sequences[at], 1, "device", "device", part) for at in batch.device]
            rows += [PlacedRows(sequences[at], 1, "host", on_host, part) for at in batch.host]
        return HomePlan(
            [sequences[order] for order in plan.preempt],
            [(sequences[move.order], move.to, move.front) for move in plan.moves],
            rows,
        )

    def admitted(self, placed: PlacedRows) -> None:
        """Count a new sequence that was admitted as planned."""
        if placed.resume is not None:
            self.resumed[placed.resume] += 1

    def learn_whole(self, step: Step, seconds: float) -> None:
        """Learn from a step in one piece, if all its rows were decode rows."""
        if step.rows == step.sequences:
            self.profile.whole_took(step.rows, round(step.attended), seconds)

    def learn(self, batch: Sequence[SequenceInput], times: Sequence[StageTime]) -> None:
        """Learn from the stages of a step that was not executed again request by request."""
        layers = 1 + max((each.layer for each in times), default=-1)
        took: dict[tuple[int, str], float] = {}
        for each in times:
            key = each.part, each.stage
            took[key] = took.get(key, 0.0) + (each.end_s - each.begin_s) / layers
        for part in {each.part for each in times}:
            rows = [row for row in batch if row.part == part]
            linear_s = took[part, "before"] + took[part, "after"]
            self.profile.linear_took(sum(len(row.tokens) for row in rows), linear_s)
            own = [row for row in rows if row.home == row.attended == "device"]
            there = [row for row in rows if row.attended == "host" or row.front]
            hosted = [len(row.positions) for row in there]
            seen = sum(PAGE * row.front or row.positions[-1] + 1 for row in there)
            # Rows of a prompt read its pages together, which the cost by sequences and tokens does not describe.
            if hosted and max(hosted) == 1:
                self.profile.attention_took("host", len(hosted), seen, took[part, "host"])
            if own and all(len(row.tokens) == 1 for row in own):
                tokens = sum(row.positions[-1] + 1 - PAGE * row.front for row in own)
                self.profile.attention_took("device", len(own), tokens, took[part, "device"])
            elif own and all(len(row.tokens) > 1 for row in own):
                pairs = sum(
                    position + 1 - PAGE * row.front for row in own for position in row.positions
                )
                self.profile.attention_took("prefill", len(own), pairs, took[part, "device"])

    def count(
        self,
        batch: Sequence[SequenceInput],
        predicted_s: float,
        measured_s: float,
        times: Sequence[StageTime],
    ) -> None:
        """Count the decode rows, the seconds and the idle times of the last planned step, which ran in stages."""
        attended = [row.attended for row in batch if len(row.tokens) == 1]
        plan = self.latest
        step = self.computed = ComputedStep(
            plan.why, len(attended), attended.count("host"), predicted_s, measured_s,
            plan.times.long_slack_s, plan.times.short_slack_s, times,
        )  # fmt: skip
        self.decoded += step.decoded
        self.on_host += step.on_host
        self.on_both += sum(row.front > 0 for row in batch if len(row.tokens) == 1)
        self.predicted_s += predicted_s
        self.measured_s += measured_s
        self.idle_s["device"] += step.device_idle_s
        self.idle_s["host"] += step.host_idle_s


def _held(sequence: TokenSequence) -> int:
    """Return the number of a sequence's pages in its home."""
    own = (held[sequence.front :] for held in sequence.pages)
    return max((sum(page >= 0 for page in held) for held in own), default=0)


def _decode_state(
    number: int, sequence: TokenSequence, table: PageTable, *, pressed: bool
) -> DecodeState:
    copies, passed, shared = table.ties(sequence) if pressed else (0, 0, ())
    pages = pages_of(sequence.length) - table.wants(sequence, [sequence.length - 1])
    return DecodeState(
        number, sequence.home, sequence.length, pages, copies, passed,
        shared, sequence.skipped, sequence.settled, sequence.front,
    )  # fmt: skip


def _prompt_state(
    number: int,
    sequence: TokenSequence,
    match: PrefixMatch,
    table: PageTable,
    *,
    splits: bool,
) -> PromptState:
    held = max(sum(page >= 0 for page in pages) for pages in match.pages)
    history = NO_HISTORY
    there, idle, copied = stands_on_host(table, sequence, match)
    if there:
        fetched = max(map(len, match.loads))
        alone = table.match(sequence, host=False).todo if fetched else match.todo
        history = HostHistory(there, idle, fetched, tuple(alone), copied)
        front = front_on_host(table, sequence, match) if splits and fetched else 0
        if front:
            later = max(sum(page >= front for page in loads) for loads in match.loads)
            history = history._replace(
                front=front, front_idle=min(idle, front), later=later,
                brought=table.takes(match, front),
            )  # fmt: skip
    return PromptState(number, tuple(match.todo), held, brought=table.takes(match), history=history)


def _ready(
    running: Sequence[TokenSequence],
    waiting: Sequence[TokenSequence],
    table: PageTable,
    tokens: int,
    most_running: int,
) -> list[tuple[TokenSequence, PrefixMatch]]:
    """Return the sequences that a step may admit, with their computed pages."""
    found: list[tuple[TokenSequence, PrefixMatch]] = []
    prefilling = [(sequence, sequence.todo) for sequence in running if not sequence.decodes]
    rows = 0
    for sequence in waiting:
        if rows >= tokens or len(running) + len(found) >= most_running:
            break
        if sequence.hold_until_s > table.tiers.now_s:
            continue
        match = table.match(sequence)
        if computed_soon(sequence, match, prefilling):
            break  # after a later step these pages are computed
        found.append((sequence, match))
        prefilling.append((sequence, match.todo))
        rows += sum(end - start for start, end in match.todo)
    return found
