"""Plain values for planning a step across device and host: sequences, pools and limits as input, plans as output."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal, NamedTuple

from common.pages.identity import PAGE
from engine.decoder.executor.interface import LocalTier
from engine.decoder.sequence import Range

SETTLE = 8  # steps that a sequence stays in a home before a move that only gains speed


class OffloadMode(StrEnum):
    """The use of the host; all modes but `asymmetric` exist for comparison with it (NEO, section 3.1 and 5.3).

    `device`: the host is not used. `simple`: all decode attention on the host, in one batch without overlap.
    `symmetric`: homes as in `asymmetric`; each of two batches has half of every home's sequences. `full`: all decode
    attention on the host, in two equal batches (FastDecode). `swap`: at every step pages on the host are copied to the
    device, layer by layer, as many as can be copied while the device computes. `asymmetric`: NEO.
    """

    DEVICE = "device"
    SIMPLE = "simple"
    SYMMETRIC = "symmetric"
    FULL = "full"
    SWAP = "swap"
    ASYMMETRIC = "asymmetric"


class HostHistory(NamedTuple):
    """The computed pages of a new prompt on the host: `pages` in all, used in place if the prompt's home is the host.

    `idle` pages are held by no sequence, and count as free on the host until they are used. `fetched` pages have no
    copy on the device; `alone` are the ranges to compute if these are recomputed. `copied` pages are only on the
    device.

    The first `front` pages, whole chunks, may stay on the host while the prompt's home is the device (0: none may).
    `front_idle` of these are held by no sequence; `later` pages are to be fetched then, and `brought` free device pages
    are taken besides new ones.
    """

    pages: int
    idle: int
    fetched: int
    alone: tuple[Range, ...]
    copied: int = 0
    front: int = 0
    front_idle: int = 0
    later: int = 0
    brought: int = 0


NO_HISTORY = HostHistory(0, 0, 0, ())


class PromptState(NamedTuple):
    """A sequence with prompt rows to compute: rising `ranges` of positions, of which the last ends with its length.

    `pages` is the number of its pages on the device: found computed, or held because it is `running`. A running prompt
    is at home on the device, since a prompt at home on the host is computed in one step. `brought` is the number of
    free device pages that its first rows take besides new ones: for pages found on the host, or found on the device and
    held by no sequence. `history` are its pages on the host. The first `front` pages stay on the host, which attends to
    them, though the home is the device.
    """

    order: int
    ranges: tuple[Range, ...]
    pages: int = 0
    running: bool = False
    brought: int = 0
    history: HostHistory = NO_HISTORY
    front: int = 0

    @property
    def rows(self) -> int:
        """The number of rows still to be computed."""
        return sum(end - start for start, end in self.ranges)

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return self.ranges[-1][1]

    def pairs(self, rows: int) -> int:
        """Return the number of (row, attended token) pairs of the next `rows` rows."""
        total = 0
        for start, end in self.ranges:
            taken = min(rows, end - start)
            total += taken * (2 * start + taken + 1) // 2
            rows -= taken
        return total

    def missing(self, rows: int) -> int:
        """Return the number of further pages for its next `rows` rows; a page that it has begun is not counted."""
        pages = self.brought if rows else 0
        for start, end in self.ranges:
            taken = min(rows, end - start)
            pages += pages_of(start + taken) - pages_of(start)
            rows -= taken
            if not rows:
                break
        return pages

    @property
    def wanted_on_host(self) -> int:
        """The number of pages to add on the host if the prompt gets its home there."""
        return pages_of(self.length) - self.history.pages

    def front_pairs(self, rows: int) -> int:
        """Return the number of (row, attended token) pairs of the next `rows` rows with tokens of the front."""
        return rows * self.front * PAGE

    @property
    def split(self) -> PromptState:
        """The prompt with its front on the host."""
        return self._replace(brought=self.history.brought, front=self.history.front)

    @property
    def anew(self) -> PromptState:
        """The prompt without fetched pages: pages that only the host has are recomputed."""
        history = self.history
        return self._replace(
            ranges=history.alone, brought=self.brought - history.fetched, history=NO_HISTORY
        )


class SharedPage(NamedTuple):
    """A page with `holders` holders: sequences, and copies in progress.

    `page` is its number in its tier; `copied` is true if the other tier has a copy in use.
    """

    page: int
    holders: int
    copied: bool


class DecodeState(NamedTuple):
    """A decoding sequence: its next row yields a token, and attends to `length` tokens including its own.

    `pages` is the number of its pages in its home; the other tier has copies of `copies` of them. `passed` pages, which
    windows have left behind, are counted in `pages` but free nothing; `shared` pages are free once all their holders
    have left. `skipped` is the number of steps in a row without a row of it, `settled` the number of steps in its home.
    Of a sequence at home on the device the first `front` pages are on the host, which attends to them; they are counted
    in `pages` and in `copies`.
    """

    order: int
    home: LocalTier
    length: int
    pages: int
    copies: int = 0
    passed: int = 0
    shared: tuple[SharedPage, ...] = ()
    skipped: int = 0
    settled: int = SETTLE
    front: int = 0

    @property
    def own(self) -> int:
        """The number of tokens that its home attends to."""
        return self.length - self.front * PAGE

    @property
    def grows(self) -> int:
        """The number of new pages for its next row."""
        return max(0, pages_of(self.length) - self.pages)


class PoolState(NamedTuple):
    """The pages of one tier: in all, and available for allocation."""

    total: int
    free: int


class OffloadState(NamedTuple):
    """The input of a plan: prompts and decoding sequences, both in order of urgency, and the pools."""

    prompts: tuple[PromptState, ...]
    decoding: tuple[DecodeState, ...]
    device: PoolState
    host: PoolState


class OffloadLimits(NamedTuple):
    """The largest step: rows (no fewer than sequences), sequences that hold pages, and predicted seconds.

    `step_s` bounds the latency of a step. A step may take longer only if its decode rows on the device alone do, with
    one page of a prompt, or with sequences that have waited as long as allowed. Fronts of sequences on the host are
    multiples of `chunk` pages; 0: the plan makes none.
    """

    tokens: int
    running: int
    step_s: float = math.inf
    chunk: int = 0


# A new prompt's use of pages that only the host has: attended in place, fetched to the device, recomputed, or split: a
# front of them attended in place, and the rest fetched to the device.
Resume = Literal["attend", "fetch", "recompute", "split"]


class PromptChunk(NamedTuple):
    """The next `rows` rows of a prompt, at home in `home`; `finishes` if the last row yields a token.

    `pages` is the number of pages taken in the home, `copied` the number of pages copied between the tiers. `attended`
    is the tier that attends with its rows, and `resume` the use of its history on the host, if there is any. With a
    `front` the host attends to so many first pages, which stay there.
    """

    order: int
    rows: int
    home: LocalTier
    finishes: bool
    pages: int
    copied: int = 0
    attended: LocalTier = "device"
    resume: Resume | None = None
    front: int = 0


class HomeMove(NamedTuple):
    """A sequence's change of home, with at most `pages` copied pages; moving to the device, it has a row in the step.

    With a `front` a sequence at home on the device leaves so many first pages to the host; one that has a front, and
    moves to the device without one, gets these pages back.

    The pages that it leaves are free in the same step, since each layer's copies run before the layer's writes.
    """

    order: int
    to: LocalTier
    pages: int
    front: int = 0


class SubBatch(NamedTuple):
    """One of a step's batches: chunks of prompts, and decoding sequences by the tier that attends to them."""

    prompts: tuple[PromptChunk, ...] = ()
    device: tuple[int, ...] = ()
    host: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """The number of rows in the batch."""
        return sum(chunk.rows for chunk in self.prompts) + len(self.device) + len(self.host)


class StageTimes(NamedTuple):
    """Predicted seconds of one layer's stages, for (batch 0, batch 1).

    In the long half of a layer batch 0's linear work runs beside batch 1's attention, in the short half batch 1's
    linear work beside batch 0's attention: max(linear_0 + device_1, host_1) + max(linear_1 + device_0, host_0) (NEO,
    3.2, where `device_1` is 0).
    """

    linear: tuple[float, float] = (0.0, 0.0)
    device: tuple[float, float] = (0.0, 0.0)
    host: tuple[float, float] = (0.0, 0.0)

    @property
    def long_slack_s(self) -> float:
        """Seconds that the device takes longer than the host in the long half; NEO's first inequality: not below 0."""
        return self.linear[0] + self.device[1] - self.host[1]

    @property
    def short_slack_s(self) -> float:
        """Seconds that the device takes longer than the host in the short half; the second inequality."""
        return self.linear[1] + self.device[0] - self.host[0]

    @property
    def layer_s(self) -> float:
        """Seconds of a layer if stages overlap."""
        long = max(self.linear[0] + self.device[1], self.host[1])
        return long + max(self.linear[1] + self.device[0], self.host[0])

    @property
    def serial_s(self) -> float:
        """Seconds of a layer without overlap."""
        return sum(self.linear) + sum(self.device) + sum(self.host)


Choice = Literal[
    "nothing", "device only", "host beside device", "two batches", "in place", "overdue", "fixed"
]


class OffloadPlan(NamedTuple):
    """The plan of one step: at most two batches, changes of home, sequences that lose their pages, and predictions.

    `seconds` is the step's predicted duration, `served` the number of decode rows plus the computed share of each
    prompt. `why` is `device only`, `host beside device` (one batch; host and device attend at the same time), `two
    batches`, `in place` (the device waits while the host attends to a prompt's history, which costs less than a copy to
    the device), `overdue` (sequences must not wait longer, or there is no other work: the inequalities need not hold),
    or `fixed` (a mode without a choice). `device_only` is the throughput of batch 0 without the host's sequences.
    `examined` counts the sequences examined by packing: the cost of planning.
    """

    batches: tuple[SubBatch, ...] = ()
    moves: tuple[HomeMove, ...] = ()
    preempt: tuple[int, ...] = ()
    times: StageTimes = StageTimes()
    seconds: float = 0.0
    served: float = 0.0
    why: Choice = "nothing"
    device_only: float = 0.0
    examined: int = 0

    @property
    def whole(self) -> bool:
        """Whether the device alone computes the step, in one piece: decode rows without the host, and no moves."""
        staged = any(batch.prompts or batch.host for batch in self.batches)
        return bool(self.batches) and not (staged or self.moves or any(self.times.host))

    @property
    def throughput(self) -> float:
        """The value `served` per second; 0 for an empty step."""
        return self.served / self.seconds if self.seconds else 0.0


def pages_of(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens take."""
    return -(-tokens // PAGE)
