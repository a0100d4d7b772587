"""Sequences, pools and plans as plain values: all that a step may compute where, and all it is planned to compute."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal, NamedTuple

from common.pages.identity import PAGE
from engine.decoder.executor.interface import LocalTier
from engine.decoder.sequence import Range

SETTLE = 8  # steps that a sequence stays in a home before it is moved for no more than speed


class OffloadMode(StrEnum):
    """How the host is used; all but `asymmetric` are there to be compared with it (NEO, section 3.1 and 5.3).

    `device`: not at all. `simple`: all decode attention on the host, one batch, nothing overlaps. `symmetric`: homes
    as in `asymmetric`, each half of every home in one of two batches. `full`: all decode attention on the host, two
    equal batches (FastDecode). `swap`: pages on the host are brought to the device at every step, layer by layer, as
    many as come while the device computes. `asymmetric`: NEO.
    """

    DEVICE = "device"
    SIMPLE = "simple"
    SYMMETRIC = "symmetric"
    FULL = "full"
    SWAP = "swap"
    ASYMMETRIC = "asymmetric"


class HostHistory(NamedTuple):
    """Pages of a new prompt that stand on the host, `pages` of them: used where they are if its home is there.

    `idle` are those that no sequence holds: they count as free on the host until they are used. The device has no copy
    of `fetched`; `alone` are the ranges to compute if these are computed anew. `copied` are found on the device only.
    """

    pages: int
    idle: int
    fetched: int
    alone: tuple[Range, ...]
    copied: int = 0


NO_HISTORY = HostHistory(0, 0, 0, ())


class PromptState(NamedTuple):
    """A sequence with prompt rows to compute: `ranges` of positions, rising, the last of which ends with its length.

    `pages` are those it has on the device: found computed, or held because it is `running`. A running one is at home
    on the device, since a prompt at home on the host is computed in one step. `brought` are pages that its first rows
    need besides their own: found computed on the host, or on the device where nobody holds them. `history` is what the
    host has of it.
    """

    order: int
    ranges: tuple[Range, ...]
    pages: int = 0
    running: bool = False
    brought: int = 0
    history: HostHistory = NO_HISTORY

    @property
    def rows(self) -> int:
        """Rows still to be computed."""
        return sum(end - start for start, end in self.ranges)

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.ranges[-1][1]

    def pairs(self, rows: int) -> int:
        """Return how many pairs of a row and a token it attends to the next `rows` rows make."""
        total = 0
        for start, end in self.ranges:
            taken = min(rows, end - start)
            total += taken * (2 * start + taken + 1) // 2
            rows -= taken
        return total

    def missing(self, rows: int) -> int:
        """Return the pages it needs for its next `rows` rows beyond those it has; a page that it began it has."""
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
        """Pages that a home on the host takes beside those that stand there."""
        return pages_of(self.length) - self.history.pages

    @property
    def anew(self) -> PromptState:
        """The prompt if nothing is fetched for it: what only the host has is computed."""
        history = self.history
        return self._replace(
            ranges=history.alone, brought=self.brought - history.fetched, history=NO_HISTORY
        )


class SharedPage(NamedTuple):
    """A page that other sequences, or copies on their way, hold as well: `holders` in all.

    `page` is its number in its tier; `copied` says that the other tier has a copy in use.
    """

    page: int
    holders: int
    copied: bool


class DecodeState(NamedTuple):
    """A sequence whose next row yields a token: it attends to `length` tokens, the row's own among them.

    `pages` are those it holds in its home, of which the other tier has `copies` too; `passed` by windows are counted,
    but there is none to free, and `shared` are free once all their holders have left. `skipped` is for how many steps
    in a row it has had no row, `settled` for how many steps it has been in its home.
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

    @property
    def grows(self) -> int:
        """Pages it needs for its next row."""
        return max(0, pages_of(self.length) - self.pages)


class PoolState(NamedTuple):
    """Pages of one tier, and how many of them can be allocated."""

    total: int
    free: int


class OffloadState(NamedTuple):
    """What a step is planned of: prompts and decoding sequences, both in order of urgency, and the pools."""

    prompts: tuple[PromptState, ...]
    decoding: tuple[DecodeState, ...]
    device: PoolState
    host: PoolState


class OffloadLimits(NamedTuple):
    """The largest step: rows (no fewer than sequences), sequences that hold pages, and predicted seconds.

    `step_s` bounds latency besides throughput. A step takes longer only where its device decode rows do without
    anything else, with one page of a prompt, or with sequences that have waited as long as they may.
    """

    tokens: int
    running: int
    step_s: float = math.inf


# How a new prompt uses pages that only the host has: attended where they are, fetched to the device, or computed anew.
Resume = Literal["attend", "fetch", "recompute"]


class PromptChunk(NamedTuple):
    """The next `rows` rows of a prompt; `finishes` if the last of them yields a token, `home` is where its pages go.

    `pages` are those it takes there, `copied` those that are copied between the tiers. `attended` is the tier that
    attends with its rows, and `resume` what becomes of its history on the host, if there is any.
    """

    order: int
    rows: int
    home: LocalTier
    finishes: bool
    pages: int
    copied: int = 0
    attended: LocalTier = "device"
    resume: Resume | None = None


class HomeMove(NamedTuple):
    """A sequence changes its home; `pages` are copied. Moved to the device it has a row in this step, to the host none.

    Pages that it leaves count as free in this step: each layer's copies come before the layer's new keys and values.
    """

    order: int
    to: LocalTier
    pages: int


class SubBatch(NamedTuple):
    """One of a step's batches: chunks of prompts, and sequences with one row each, by the tier that attends."""

    prompts: tuple[PromptChunk, ...] = ()
    device: tuple[int, ...] = ()
    host: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return sum(chunk.rows for chunk in self.prompts) + len(self.device) + len(self.host)


class StageTimes(NamedTuple):
    """Predicted seconds of one layer's stages, of batch 0 and batch 1.

    In the long half batch 0's linear work runs beside batch 1's attention, in the short half the other way round:
    max(linear_0 + device_1, host_1) + max(linear_1 + device_0, host_0) (NEO, 3.2; `device_1` is 0 there).
    """

    linear: tuple[float, float] = (0.0, 0.0)
    device: tuple[float, float] = (0.0, 0.0)
    host: tuple[float, float] = (0.0, 0.0)

    @property
    def long_slack_s(self) -> float:
        """Seconds by which the host is done before the device in the long half; the first inequality: not below 0."""
        return self.linear[0] + self.device[1] - self.host[1]

    @property
    def short_slack_s(self) -> float:
        """Seconds by which the host is done before the device in the short half; the second inequality."""
        return self.linear[1] + self.device[0] - self.host[0]

    @property
    def layer_s(self) -> float:
        """Seconds of a layer whose stages overlap."""
        long = max(self.linear[0] + self.device[1], self.host[1])
        return long + max(self.linear[1] + self.device[0], self.host[0])

    @property
    def serial_s(self) -> float:
        """Seconds of a layer of which nothing overlaps."""
        return sum(self.linear) + sum(self.device) + sum(self.host)


Choice = Literal[
    "nothing", "device only", "host beside device", "two batches", "in place", "overdue", "fixed"
]


class OffloadPlan(NamedTuple):
    """One step: at most two batches, changes of homes, sequences that lose their pages, and what is predicted.

    `seconds` are the step's, `served` its rows that decode plus the shares of its prompts that it computes. `why` is
    `device only`, `host beside device` (one batch; the host attends while the device does), `two batches`, `in place`
    (the device waits while a prompt's history is attended on the host, which costs less than to bring it), `overdue`
    (sequences that may wait no longer, or nothing else to do: the inequalities need not hold), or `fixed` (a mode that
    does not choose). `device_only` is the served share a second of batch 0 without the host's sequences.
    `examined` counts the sequences looked at while packing, the cost of planning.
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
    def throughput(self) -> float:
        """Served a second; 0 of an empty step."""
        return self.served / self.seconds if self.seconds else 0.0


def pages_of(tokens: int) -> int:
    """Return the pages that so many tokens fill."""
    return -(-tokens // PAGE)
