"""A model without arithmetic: each slot of each page holds the hash of all tokens up to it, so any wrong page shows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import NamedTuple

from common.pages.identity import PAGE, root_id
from engine.decoder.executor.interface import ModelShape, PageMove
from engine.decoder.scheduler import ScheduledRows, Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence

VOCABULARY = 50
Spans = tuple[tuple[int, int], ...]


class Rewrite(NamedTuple):
    """Another prompt for a sequence before step `at`, and for how many steps it is paused then."""

    at: int
    pause: int
    prompt: tuple[int, ...]
    spans: Spans = ()


class Ask(NamedTuple):
    """One sequence to generate: it arrives before step `at` and leaves early before step `leaves` (-1: never).

    `spans` of its prompt are computed alone, in a simulation without windows and without a short context.
    """

    at: int
    prompt: tuple[int, ...]
    new: int
    leaves: int = -1
    scope: str = ""
    changes: tuple[Rewrite, ...] = ()
    spans: Spans = ()


def extend(
    slots: list[bytes], tokens: list[int], short_context: int = 0, spans: Spans = ()
) -> list[bytes]:
    """Bring `slots` up to all of `tokens`: what K and V of a position are a function of.

    They are others in texts that are longer than the short context; then `slots` must be those of such a text. What is
    in a span follows the first token; what comes behind a span follows the span and what stands before it.
    """
    first = b"long" if 0 < short_context < len(tokens) else b""
    begins, ends = {begin for begin, _ in spans}, {end: begin for begin, end in spans}
    for position in range(len(slots), len(tokens)):
        before = slots[position - 1] if position else first
        if position in ends:
            before += slots[ends[position] - 1]
        if position in begins:
            before = slots[0]
        slots.append(hashlib.blake2b(before + bytes([tokens[position]]), digest_size=8).digest())
    return slots


def drawn(slots: list[bytes]) -> int:
    """The token after `slots`; few values, so that sequences often agree."""
    return slots[-1][0] % VOCABULARY


def alone(ask: Ask) -> list[int]:
    """What a sequence generates when nothing else exists."""
    tokens, slots = list(ask.prompt), list[bytes]()
    for _ in range(ask.new):
        tokens.append(drawn(extend(slots, tokens, spans=ask.spans)))
    return tokens[len(ask.prompt) :]


class Simulation:
    """Runs asks through a scheduler, checking every invariant at every step; `history` is what it decided."""

    def __init__(
        self, shape: ModelShape, bounds: StepLimits, asks: list[Ask], short_context: int = 0
    ) -> None:
        self.shape, self.bounds, self.short_context = shape, bounds, short_context
        self.scheduler = Scheduler(shape, bounds)
        self.memory: list[list[list[bytes]]] = [
            [[b""] * PAGE for _ in range(shape.pages)] for _ in shape.windows
        ]
        self.host: list[list[list[bytes]]] = [
            [[b""] * PAGE for _ in range(shape.host_pages)] for _ in shape.windows
        ]
        self.saving: list[tuple[PageMove, list[bytes]]] = []
        self.chance = random.Random(len(asks))
        self.loaded = self.damaged = 0
        self.placing = short_context == 0 and not any(shape.windows)
        self.sequences = [
            TokenSequence(
                f"job{order}",
                0,
                order,
                ask.prompt,
                root=root_id("0f", ask.scope),
                most=len(ask.prompt) + ask.new,
                short_context=short_context,
                spans=ask.spans if self.placing else (),
            )
            for order, ask in enumerate(asks)
        ]
        self.asks = asks
        self.slots: list[list[bytes]] = [[] for _ in asks]
        self.history: list[list[tuple[int, list[int], bool, list[list[int]]]]] = []
        self.ended: list[int] = []
        self.started: list[int] = []
        self.computed = 0
        # Per sequence, after how many tokens it got which prompt.
        self.prompts = [[(0, ask.prompt, ask.spans)] for ask in asks]
        self.resumes: dict[int, int] = {}  # paused sequences, and before which step they go on

    def run(self) -> Simulation:
        """Run to the end; AssertionError where an invariant breaks or nothing moves."""
        at, idle = 0, 0
        while len(self.ended) < len(self.asks):
            for order, ask in enumerate(self.asks):
                sequence = self.sequences[order]
                if ask.at == at:
                    assert self.scheduler.fits(sequence)
                    self.scheduler.add(sequence)
                if ask.leaves == at and ask.at < at and order not in self.ended:
                    self.scheduler.drop([sequence])
                    self.ended.append(order)
                if ask.at < at and order not in self.ended:
                    self._change(order, at)
            idle = 0 if self._step() or max(ask.at for ask in self.asks) >= at else idle + 1
            assert idle < 20, "nothing moves"  # pages on their way to the host arrive before that
            at += 1
        self._end_saves()
        self.scheduler.check()
        tiers = self.scheduler.table.tiers
        assert all(pool.used == 0 for pool in [*tiers.device, *tiers.host])
        return self

    def _change(self, order: int, at: int) -> None:
        """Rewrite and pause a sequence, or let it go on, where that is asked for at this step."""
        sequence = self.sequences[order]
        for change in self.asks[order].changes:
            if change.at == at:
                self.scheduler.rewrite(
                    sequence, change.prompt, change.spans if self.placing else ()
                )
                self.slots[order] = []
                self.prompts[order].append((len(sequence.output), change.prompt, change.spans))
                self.scheduler.pause(sequence)
                self.resumes[order] = at + change.pause
        if self.resumes.get(order) == at:
            self.scheduler.unpause(sequence)

    def expected(self, order: int) -> list[int]:
        """Return what a sequence alone generates that gets the same prompts after as many tokens."""
        output: list[int] = []
        while len(output) < self.asks[order].new:
            _, prompt, spans = [each for each in self.prompts[order] if each[0] <= len(output)][-1]
            spans = spans if self.placing else ()
            output.append(drawn(extend([], [*prompt, *output], self.short_context, spans)))
        return output

    def _step(self) -> bool:
        parts = self.scheduler.step(now_s=len(self.history) / 8)
        self.scheduler.check(parts)
        self._check_order()
        self.history.append(
            [
                (p.sequence.order, list(p.positions), p.draws, [list(g) for g in p.sequence.pages])
                for p in parts
            ]
        )
        assert sum(len(part.positions) for part in parts) <= self.bounds.tokens
        assert len(self.scheduler.running) <= self.bounds.running
        self._load()
        parts = [part for part in parts if part.sequence.pages]
        for part in parts:
            self._write(part)
        tokens = [self._read(part) for part in parts]
        for part, token in zip(parts, tokens, strict=True):
            self.scheduler.commit(part, token)
            sequence = part.sequence
            if sequence.length == sequence.most:
                self.scheduler.drop([sequence])
                self.ended.append(sequence.order)
        self._save()
        return bool(parts)

    def _load(self) -> None:
        """Copy what is to be loaded; now and then a page is damaged, and whoever got it must begin again."""
        for move in self.scheduler.loads:
            sound = self.chance.random() < 0.9
            page = self.host[move.group][move.source]
            self.memory[move.group][move.target] = list(page) if sound else [b"?"] * PAGE
            self.scheduler.moved(move, sound=sound)
            self.loaded += 1
            self.damaged += not sound

    def _save(self) -> None:
        """Copy pages down, some of them over several steps."""
        for move in self.scheduler.table.tiers.saves(2):
            self.saving.append((move, list(self.memory[move.group][move.source])))
        if self.chance.random() < 0.7:
            self._end_saves()

    def _end_saves(self) -> None:
        for move, page in self.saving:
            assert self.memory[move.group][move.source] == page, "a page changed while it was saved"
            self.host[move.group][move.target] = page
            self.scheduler.moved(move, sound=True)
        self.saving = []

    def _check_order(self) -> None:
        """First come, first served: who is admitted came before all who wait."""
        running = [sequence.order for sequence in self.scheduler.running]
        if any(ask.changes for ask in self.asks):
            return  # one that was paused, and kept its pages, goes on before all who wait
        for order in running:
            if order not in self.started:
                assert all(other.order > order for other in self.scheduler.waiting)
        self.started = running
        assert running == sorted(running)

    def _write(self, part: ScheduledRows) -> None:
        slots = self._slots(part)
        self.computed += len(part.positions)
        for group, pages in enumerate(part.sequence.pages):
            pool = self.scheduler.table.pools[group]
            for position in part.positions:
                page = pages[position // PAGE]
                assert page >= 0
                memory = self.memory[group][page]
                if pool.references(page) > 1:
                    assert memory[position % PAGE] == slots[position], "a shared page is written"
                memory[position % PAGE] = slots[position]

    def _slots(self, part: ScheduledRows) -> list[bytes]:
        order, tokens = part.sequence.order, part.sequence.tokens()
        if len(self.slots[order]) <= self.short_context < len(tokens):
            self.slots[order] = []  # the text has become a long one
        assert part.sequence.long is (0 < self.short_context < len(tokens))
        spans = tuple(part.sequence.spans)
        return extend(self.slots[order], tokens, self.short_context, spans)

    def _read(self, part: ScheduledRows) -> int | None:
        """Check that every position every row sees is there, and draw if the last row is the last token's."""
        slots = self._slots(part)
        for group, pages in enumerate(part.sequence.pages):
            window, checked = self.shape.windows[group], 0
            for position in part.positions:
                first = 0 if window is None else max(0, position - window + 1)
                for seen in range(max(first, checked), position + 1):
                    page = pages[seen // PAGE]
                    assert page >= 0, "a row sees a position that is not resident"
                    assert self.memory[group][page][seen % PAGE] == slots[seen]
                checked = position + 1
        assert part.draws == (part.positions[-1] == len(slots) - 1)
        return drawn(slots) if part.draws else None


def some_spans(rng: random.Random, prompt: Sequence[int]) -> Spans:
    """Return up to three spans of a prompt, mostly none, without its first and its last token."""
    ends = sorted(rng.sample(range(1, len(prompt)), min(6, len(prompt) - 1) // 2 * 2))
    if rng.random() < 0.6:
        return ()
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def prompts(rng: random.Random, count: int, longest: int) -> list[tuple[int, ...]]:
    """Return prompts of which many share beginnings with others."""
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        head: tuple[int, ...] = ()
        if made and rng.random() < 0.6:
            other = rng.choice(made)
            head = other[: rng.randint(0, len(other))]
        tail = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest)))
        made.append((head + tail)[:longest] or (1,))
    return made
