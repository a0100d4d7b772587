"""The background work of inverted lists: train a quantizer, put rows into the lists, train anew, drop deleted rows.

The quantizer is the collection's where there is one that fits, else one is trained here and offered to all shards.
Whatever is made is made beside the searches and swapped in; what fails leaves in use what there was.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np

from common import log
from common.clock import Clock
from common.wire.tuning import IndexPlan, MeasuredPlan
from services.vector_search import metrics
from services.vector_search.index import search_path
from services.vector_search.index.followed_plan import divided, falls_short, proof
from services.vector_search.index.inverted_lists import InvertedLists, code
from services.vector_search.index.lists_recall import ListsRecall
from services.vector_search.index.quantizer import USUAL, Coding, Quantizer
from services.vector_search.index.quantizer_source import QuantizerSource, TrainedQuantizer
from services.vector_search.index.quantizer_training import (
    ENOUGH_ROWS,
    LEAST_PER_LIST,
    SAMPLE_BYTES,
    Trainer,
    TrainingFailed,
    TrainingWork,
)
from services.vector_search.index.rows import Ints, Metric, RowsView, VectorRows
from services.vector_search.index.state import IndexState
from services.vector_search.index.training_room import LEAST_ROWS, sample_rows, training_bytes

_COMPACT_RATIO, _COMPACT_ROWS = 0.3, 256
_COPIED_AT_ONCE = 2000
# Rows that are coded before lists with them are made.
_CODED_AT_ONCE = 32_768
# Rows that wait, at least, until there are lists with them: so many, or such a share of those in lists.
_WAITING_ROWS, _WAITING_SHARE = 1024, 1 / 256
_MOST_LISTS = 4096
# A quantizer is trained anew once there are so many times the rows it was trained for, or so many times as many but
# lists so uneven.
_OUTGROWN, _OUTGROWN_UNEVEN, _UNEVEN = 4.0, 1.5, 3.0
# The effort is chosen anew when the lists have grown by this factor.
_TUNED_GROWTH = 1.2
_RETRY_S = 60.0
_log = log.get("vector_search")


def lists_for(rows: int) -> int:
    """Return how many lists so many rows have: a power of two near one and a half times their root.

    There are fewer where less than 39 rows would be in each.
    """
    wanted = 1 << round(math.log2(max(1.5 * math.sqrt(rows), 1.0)))
    return max(1, min(wanted, rows // LEAST_PER_LIST, _MOST_LISTS))


class ListsMaintenance:
    """Does the background work of one index of lists; one thread calls `step`.

    `problem` says why the last training failed, "" if it did not; it is tried again after a minute. `room` tells the
    bytes that a training may take, None if they are unknown.
    """

    def __init__(
        self,
        state: IndexState,
        recall: ListsRecall,
        metric: Metric,
        *,
        threads: int,
        clock: Clock,
        trainer: Trainer,
        quantizers: QuantizerSource,
        room: Callable[[], int | None],
    ) -> None:
        self._room = room
        self._state, self._recall, self._metric = state, recall, metric
        self._quantizers = quantizers
        self._threads, self._clock, self._train = threads, clock, trainer
        self._closing = threading.Event()
        self._tuned_at = 0  # how many rows the lists covered when the effort was chosen
        self._again_s = 0.0
        self.problem = ""

    def restored(self, covered: int) -> None:
        """Note that saved lists over so many rows were taken over, whose effort fits them."""
        self._tuned_at = covered

    def close(self) -> None:
        """Stop what is in progress at its next step."""
        self._closing.set()

    def step(self) -> bool:
        """Do one bounded piece of work, if there is any; True if there may be more."""
        view = self._state.view
        rows, lists = view.rows, view.lists
        if rows.live_count and self._renew(rows, lists):
            return True
        if lists is None or self._closing.is_set():
            return False
        if rows.dead >= _COMPACT_ROWS and rows.deleted_ratio > _COMPACT_RATIO:
            return self._compact(rows, lists)
        return self.take_in()

    def take_in(self) -> bool:
        """Put some of the newer rows into the lists there are, if there are any; True if there may be more."""
        view = self._state.view
        rows, lists = view.rows, view.lists
        if lists is None:
            return False
        behind = rows.view.size - lists.covered
        if behind < max(_WAITING_ROWS, int(_WAITING_SHARE * lists.covered)):
            return False
        self._extend(lists, rows.view)
        return True

    def _renew(self, rows: VectorRows, lists: InvertedLists | None) -> bool:
        """Build lists if there are none, or others are due; False if nothing came of it, or another shard trains."""
        known, live = self._quantizers.current(), rows.live_count
        plan = self._state.followed.due("ivfpq", live)
        if known is None and lists is not None and plan is None:
            own = TrainedQuantizer(lists.quantizer, lists.quantizer.lists)
            if not _outgrown(own.quantizer, lists, live):
                # Lists of a start come before the collection has a quantizer, or after the registry lost it.
                if self._quantizers.may_train():
                    self._quantizers.offer(own)
                return False
        if known is None or _unfit(known, plan, lists, live):
            due = self._clock.perf_s() >= self._again_s
            return due and self._quantizers.may_train() and self._build(rows, None)
        if lists is None or plan is not None or _differ(lists.quantizer, known.quantizer):
            return self._build(rows, known)
        return False

    def _build(self, rows: VectorRows, known: TrainedQuantizer | None) -> bool:
        """Put all rows into lists by a quantizer, else by one that is trained first, and swap them in.

        False if nothing came of it.
        """
        view, plan = rows.view, self._state.followed.held("ivfpq", rows.live_count)
        kept = np.flatnonzero(view.live[: view.size].copy())
        order = np.random.default_rng(len(kept)).permutation(kept)
        count = search_path.AUDITED * (1 if plan is None else 2)
        held_out = np.sort(order[: min(count, len(kept) // 4)])
        try:
            made = known or self._trained(view, order[len(held_out) :], plan)
        except (TrainingFailed, MemoryError) as error:
            self._quantizers.give_up()
            if self._closing.is_set():
                return False
            self.problem = str(error) or "not enough memory"
            if plan is not None:
                self._state.followed.refuse(plan, self.problem)
            self._again_s = self._clock.perf_s() + _RETRY_S
            _log.warning("quantizer_not_trained", why=self.problem)
            return False
        self.problem, quantizer = "", made.quantizer
        if known is None and plan is None:
            self._quantizers.offer(made)
        lists = InvertedLists.empty(quantizer)
        for at in range(0, len(kept), _CODED_AT_ONCE):
            if self._closing.is_set():
                return False
            part = kept[at : at + _CODED_AT_ONCE]
            lists = lists.with_more(code(quantizer, view, part), int(part[-1]) + 1)
        lists = lists.with_more(code(quantizer, view, kept[:0]), view.size)
        asked = held_out if plan is None else divided(view.labels, held_out).tuning
        lists = self._recall.tune(lists, view, view.matrix[asked], held_out=held_out)
        measured = None if plan is None else self._proof(plan, lists, view, held_out)
        if (plan is not None and measured is None) or self._state.followed.dropped(plan):
            if known is None:
                self._quantizers.give_up()
            return False
        self._tuned_at = lists.covered
        self._state.take_lists(lists)
        if plan is not None and measured is not None:
            self._state.followed.built(plan, measured)
            if known is None:
                self._quantizers.offer(made)
        self._recall.renew()
        return True

    def _proof(
        self, plan: IndexPlan, lists: InvertedLists, view: RowsView, held_out: Ints
    ) -> MeasuredPlan | None:
        """Return what lists built by a plan find; None if that falls short, and the plan is refused."""
        asked = divided(view.labels, held_out).proof
        recall = self._recall.proof(lists, view, view.matrix[asked], held_out)
        measured = proof(recall, len(asked))
        if why := falls_short(plan, measured):
            self._state.followed.refuse(plan, why)
            return None
        return measured

    def _trained(self, view: RowsView, rows: Ints, plan: IndexPlan | None) -> TrainedQuantizer:
        lists = lists_for(len(rows)) if plan is None else plan.setting.lists
        dimension = view.matrix.shape[1]
        enough = min(max(ENOUGH_ROWS, LEAST_PER_LIST * lists), SAMPLE_BYTES // (4 * dimension))
        room, wanted = self._room(), min(enough, len(rows))
        count = sample_rows(wanted, dimension, room)
        if room is not None and count == 0 < wanted:
            needed = training_bytes(min(wanted, LEAST_ROWS), dimension)
            raise TrainingFailed(
                f"it needs {needed >> 20:,} MiB beside the process, which may take {max(room, 0) >> 20:,} more"
            )
        sample = np.ascontiguousarray(view.matrix[np.sort(rows[:count])])
        work = TrainingWork(
            metric=self._metric,
            lists=lists,
            rows=len(rows),
            sample=len(sample),
            dimension=dimension,
            threads=self._threads,
            coding=USUAL if plan is None else Coding.of(plan.setting),
        )
        return TrainedQuantizer(self._train(work, sample, self._closing.is_set), lists)

    def _extend(self, lists: InvertedLists, view: RowsView) -> None:
        """Put some of the rows that wait into lists; by some of them the effort is chosen if the lists grew much."""
        end = min(view.size, lists.covered + _CODED_AT_ONCE)
        fresh = np.arange(lists.covered, end)[view.live[lists.covered : end].copy()]
        lists = lists.with_more(code(lists.quantizer, view, fresh), end)
        if lists.covered > _TUNED_GROWTH * self._tuned_at and len(fresh):
            some = fresh[:: -(-len(fresh) // search_path.AUDITED)]
            lists = self._recall.tune(lists, view, view.matrix[some], held_out=some)
            self._tuned_at = lists.covered
        self._state.take_lists(lists)

    def _compact(self, rows: VectorRows, lists: InvertedLists) -> bool:
        """Copy the live rows, give the lists their new numbers, and swap both in."""
        before = rows.view
        kept = np.flatnonzero(before.live[: before.size].copy())
        made = rows.empty(max(1024, len(kept)))
        for at in range(0, len(kept), _COPIED_AT_ONCE):
            if self._closing.is_set():
                return False
            part = kept[at : at + _COPIED_AT_ONCE]
            made.append(before.matrix[part], before.labels[part], before.numbers[part])
        self._state.swap(made, None, before, kept, lists.renumbered(kept))
        metrics.COMPACTIONS.inc()
        return True


def _unfit(
    known: TrainedQuantizer, plan: IndexPlan | None, lists: InvertedLists | None, live: int
) -> bool:
    """Return whether another quantizer is to be trained: for a plan that is due, or since the rows outgrew this one."""
    if plan is not None:
        wanted = plan.setting.lists, Coding.of(plan.setting)
        if wanted != (known.asked, known.quantizer.coding):
            return True
    return _outgrown(known.quantizer, lists, live)


def _outgrown(quantizer: Quantizer, lists: InvertedLists | None, live: int) -> bool:
    grown = live / max(quantizer.trained, 1)
    if grown < _OUTGROWN_UNEVEN:
        return False
    own = lists is not None and not _differ(lists.quantizer, quantizer)
    return grown >= _OUTGROWN or (own and lists is not None and lists.unevenness > _UNEVEN)


def _differ(one: Quantizer, other: Quantizer) -> bool:
    return one is not other and one.version != other.version
