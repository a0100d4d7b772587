"""The pipeline of a step in stages: each layer before, in and after attention, with two sub-batches at once.

While the host attends to one sub-batch, the device computes the other (NEO, section 3.1). The plan assigns sequences to
sub-batches and to the tier that attends; the pipeline runs the plans of all modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from common.pages.identity import PAGE
from engine.decoder.executor.host_attention import (
    HostAttention,
    HostResult,
    HostSpan,
    HostSubBatch,
)
from engine.decoder.executor.host_link import FrontRows, HostLink, HostRows
from engine.decoder.executor.interface import (
    HomeMoves,
    LocalTier,
    SequenceInput,
    StageTime,
)
from engine.decoder.executor.stage_clock import StageClock
from engine.kernels.attention_plan import QueryRows
from engine.kernels.page_arrival import PageArrival
from engine.kernels.page_memory import PageMemory, copy_pages, read_layer, store_layer
from engine.kernels.partial import Partial
from engine.kernels.two_sides import SplitRows
from engine.models.decoders.spec import DecoderSpec


class DecoderState(Protocol):
    """The rows of a step between two stages; after the last stage `rows` (rows, hidden) lack only the last norm."""

    rows: Tensor

    def before(self, layer: int) -> Tensor:
        """Return queries, keys and values of a layer, rotated: (rows, heads + 2 * kv heads, dim)."""

    def after(self, layer: int, attended: Tensor) -> None:
        """Finish a layer, given the result of its attention, (rows, heads, dim): projection and MLP."""


class LayerAttention(Protocol):
    """Attention of a step on the device, planned once for all layers."""

    def attend(self, group: int, at: int, joined: Tensor, out: Tensor) -> None:
        """Write keys and values to their pages and attend with the queries in layer `at` of a group."""


class RestAttention(Protocol):
    """Attention of a step on the device to the pages after fronts that the host attends to, planned once."""

    def attend(self, group: int, at: int, joined: Tensor) -> None:
        """Write keys and values to their pages and attend in layer `at` of a group, up to the merging."""

    def join(self, front: Partial, out: Tensor) -> None:
        """Merge what the last call of `attend` found into the attention to the fronts, and write the result."""


class StagedDecoder(Protocol):
    """A loaded model whose layers can be computed stage by stage."""

    spec: DecoderSpec

    @property
    def device(self) -> torch.device:
        """The device that computes."""

    def begin(self, tokens: Tensor, positions: Tensor, long: Tensor | None = None) -> DecoderState:
        """Begin a step with rows (rows,) of token ids at positions (rows,); `long` (rows,) marks rows of long texts."""

    def planned(self, queries: Sequence[QueryRows], pools: Sequence[PageMemory]) -> LayerAttention:
        """Plan attention over pages on the device; ValueError if a page that a row needs is missing."""

    def planned_rest(
        self, queries: Sequence[SplitRows], pools: Sequence[PageMemory]
    ) -> RestAttention:
        """Plan attention over pages after fronts; ValueError as in `rest_sides`."""


class StagePipeline:
    """Computes steps in stages over pages on the device and pages on the host. One thread calls it.

    Host pages that the device attends to are copied to staging pages on the device, which hold one layer at a time, for
    as many pages as a sub-batch needs. `attended` counts decode and prompt rows by the tier that attended to them,
    `on_both` those of sequences with a front, which both tiers attended to. On CUDA stages are queued, and copies
    between the tiers run beside them on the `link`'s stream; the calling thread waits only for attention on the host.
    """

    def __init__(
        self,
        decoder: StagedDecoder,
        device: Sequence[PageMemory],
        host: Sequence[PageMemory],
        attention: HostAttention,
    ) -> None:
        """`device` and `host` have a pool for each layer group, the host's packed; `attention` attends on the host."""
        self.decoder, self.device, self.host, self.attention = decoder, device, host, attention
        self.places = {
            layer: (group, at) for group, pool in enumerate(device) for at, layer in enumerate(pool.layers)
        }  # fmt: skip
        self.attended: dict[LocalTier, int] = {"device": 0, "host": 0}
        self.on_both = 0
        self.link, self.clock = HostLink(decoder.device), StageClock(decoder.device)
        self._staging: list[PageMemory] = []

    def hidden(
        self,
        batch: Sequence[SequenceInput],
        arrival: PageArrival | None = None,
        moves: HomeMoves | None = None,
    ) -> Tensor:
        """Compute the rows of all sequences and write their K and V; return (rows, hidden) in the order of `batch`.

        Even after an error all `moves` are done, and no work is in progress when this returns.
        """
        self.clock.restart()
        flights: list[_Flight] = []
        try:
            for part in sorted({rows.part for rows in batch}):
                chosen = [index for index, rows in enumerate(batch) if rows.part == part]
                flights.append(_Flight(self, part, batch, chosen))
            for layer in range(len(self.places)):
                self._move(moves, layer)
                if arrival is not None:
                    arrival.wait(layer)
                for flight in flights:
                    flight.finish()
                    flight.start(layer)
            for flight in flights:
                flight.finish()
        finally:
            for flight in flights:
                flight.settle()
            for layer in range(len(self.places)):
                self._move(moves, layer)
            self.link.wait()
        for rows in batch:
            self.attended[rows.attended] += len(rows.tokens)
            self.on_both += len(rows.tokens) if rows.front else 0
        return _in_order(batch, flights)

    @property
    def times(self) -> list[StageTime]:
        """The stages of the last step."""
        return self.clock.times

    def staging(self, pages: int) -> list[PageMemory]:
        """Return, for each layer group, a pool of at least `pages` staging pages, of one layer each."""
        if not self._staging or self._staging[0].pages < pages:
            dtype, packed = self.device[0].data.dtype, self.device[0].packed
            self._staging = [
                PageMemory(
                    self.decoder.spec, pool.window, [0], pages, dtype=dtype, device=self.decoder.device,
                    packed=packed,
                )
                for pool in self.device
            ]  # fmt: skip
            with self.link.copying(after=True, before=False):
                pass  # copies wait until the pages are allocated
        return self._staging

    def _move(self, moves: HomeMoves | None, layer: int) -> None:
        """Copy one layer of the pages that change their home, unless it is copied already."""
        if moves is None or not moves.moves or moves.layers > layer:
            return
        group, at = self.places[layer]
        # Earlier steps computed the pages' contents, so the copies need not wait for this step's work.
        with self.link.copying(after=False, before=True):
            self._copy(moves, group, at)
        moves.layers = layer + 1

    def _copy(self, moves: HomeMoves, group: int, at: int) -> None:
        """Copy layer `at` of a group of the pages that change their home."""
        found: list[tuple[PageMemory, list[int], Tensor]] = []
        for kind, source, target in (
            ("save", self.device[group], self.host[group]),
            ("load", self.host[group], self.device[group]),
        ):
            chosen = [move for move in moves.moves if (move.kind, move.group) == (kind, group)]
            if chosen:
                pages = [move.source for move in chosen]
                data = read_layer(source, pages, at, target.data.device)
                found.append((target, [move.target for move in chosen], data))
        for target, targets, data in found:
            store_layer(target, targets, at, data)


class _Flight:
    """One sub-batch on its way through the layers; its rows are sorted by who attends: device, both, staged, host."""

    def __init__(
        self, pipeline: StagePipeline, part: int, batch: Sequence[SequenceInput], chosen: list[int]
    ) -> None:
        self._pipeline, self._part, self._batch = pipeline, part, batch
        kinds = [_kind(batch[index]) for index in chosen]
        groups = [
            [index for index, kind in zip(chosen, kinds, strict=True) if kind == name]
            for name in ("device", "split", "staged", "host")
        ]
        self.order = [index for group in groups for index in group]
        rows = [batch[index] for index in self.order]
        device = pipeline.decoder.device
        tokens = torch.tensor([token for each in rows for token in each.tokens], device=device)
        positions = torch.tensor([at for each in rows for at in each.positions], device=device)
        ends = list(accumulate(sum(len(batch[i].tokens) for i in group) for group in groups))
        self._ends = (0, *ends)
        own, split, staged, hosted = ([batch[index] for index in group] for group in groups)
        self._own = pipeline.decoder.planned(own, pipeline.device) if own else None
        self._split = _Fronted(pipeline, split) if split else None
        self._staged = _Staged(pipeline, staged) if staged else None
        self._hosted: HostSubBatch | None = pipeline.attention.plan(hosted) if hosted else None
        spec = pipeline.decoder.spec
        self._way = HostRows(
            pipeline.link, self._ends[4] - self._ends[3], spec.heads, spec.kv_heads, spec.head_dim
        )
        long = [each.long for each in rows for _ in each.tokens]
        far = torch.tensor(long, device=device) if any(long) else None
        self._state = pipeline.decoder.begin(tokens, positions, far)
        self._layer = -1
        self._attended = torch.empty(0)
        self._waits: HostResult | None = None

    @property
    def rows(self) -> Tensor:
        """The hidden states of the sub-batch's rows."""
        return self._state.rows

    def start(self, layer: int) -> None:
        """Compute a layer up to its attention; start attention on the host, and attend on the device."""
        spec, (group, at) = self._pipeline.decoder.spec, self._pipeline.places[layer]
        timed, part, way = self._pipeline.clock.timed, self._part, self._way
        self._layer = layer
        joined = timed("before", part, layer, lambda: self._state.before(layer))
        self._attended = joined.new_empty(len(joined), spec.heads, spec.head_dim)
        own, both, staged = (slice(*self._ends[at : at + 2]) for at in range(3))
        if self._split is not None:
            self._split.hand_over(group, at, joined[both])
        if self._hosted is not None:
            way.send(joined[self._ends[3] :])
            self._waits = self._hosted.submit(group, at, way.joined, way.result, way.ready)
        if self._own is not None:
            attention, out = self._own, self._attended[own]
            timed("device", part, layer, lambda: attention.attend(group, at, joined[own], out))
        if self._split is not None:
            rest = self._split.rest
            timed("device", part, layer, lambda: rest.attend(group, at, joined[both]))
        if self._staged is not None:
            coming, there = self._staged, self._attended[staged]
            timed("staged", part, layer, lambda: coming.attend(group, at, joined[staged], there))

    def finish(self) -> None:
        """Wait for attention on the host, and compute the rest of the layer that was started."""
        if self._layer < 0:
            return
        if self._split is not None:
            split, there = self._split, self._attended[slice(*self._ends[1:3])]
            span = split.wait()
            self._pipeline.clock.note(StageTime("host", self._part, self._layer, *span))
            self._pipeline.clock.timed("device", self._part, self._layer, lambda: split.join(there))
        if self._waits is not None:
            span = self._waits.wait()
            self._waits = None
            self._pipeline.clock.note(StageTime("host", self._part, self._layer, *span))
            self._way.bring(self._attended[self._ends[3] :])
        self._pipeline.clock.timed(
            "after", self._part, self._layer, lambda: self._state.after(self._layer, self._attended)
        )

    def settle(self) -> None:
        """Wait until the host has no work of this sub-batch in progress; ignore errors of that work."""
        waits, self._waits = self._waits, None
        if waits is not None:
            with suppress(Exception):  # another error is being raised
                waits.wait()
        if self._split is not None:
            self._split.settle()


class _Fronted:
    """Sequences with fronts: the host attends to these, while the device attends to the `rest` of their pages."""

    def __init__(self, pipeline: StagePipeline, batch: Sequence[SequenceInput]) -> None:
        spec, rows = pipeline.decoder.spec, sum(len(each.tokens) for each in batch)
        self.rest = pipeline.decoder.planned_rest(batch, pipeline.device)
        self._fronts = pipeline.attention.plan_fronts(batch)
        self._way = FrontRows(pipeline.link, rows, spec.heads, spec.kv_heads, spec.head_dim)
        self._waits: HostResult | None = None

    def hand_over(self, group: int, at: int, joined: Tensor) -> None:
        """Let the host attend to the fronts in layer `at` of a group."""
        way = self._way.rows
        way.send(joined)
        self._waits = self._fronts.submit(group, at, way.joined, self._way.found, way.ready)

    def wait(self) -> HostSpan:
        """Wait for the host, or raise the error of its attention."""
        assert self._waits is not None
        span = self._waits.wait()
        self._waits = None
        return span

    def join(self, out: Tensor) -> None:
        """Write the attention to all pages."""
        self.rest.join(self._way.bring(), out)

    def settle(self) -> None:
        """Wait until the host has no work of these sequences in progress; ignore errors of that work."""
        waits, self._waits = self._waits, None
        if waits is not None:
            with suppress(Exception):  # another error is being raised
                waits.wait()


class _Staged:
    """Host sequences that the device attends to: each layer's pages are copied in, and written pages back."""

    def __init__(self, pipeline: StagePipeline, batch: Sequence[SequenceInput]) -> None:
        self._host, self._link = pipeline.host, pipeline.link
        self._places: list[dict[int, int]] = []  # by group: host page -> staging page
        self._comes: list[list[int]] = []  # host pages to copy in: earlier tokens are seen
        self._goes: list[list[int]] = []  # host pages to copy back: rows are written
        for group, pool in enumerate(pipeline.host):
            comes: dict[int, None] = {}
            goes: dict[int, None] = {}
            for rows in batch:
                seen, written = _pages_of(rows, group, pool.window)
                comes.update(dict.fromkeys(seen))
                goes.update(dict.fromkeys(written))
            self._places.append({page: n for n, page in enumerate({**comes, **goes})})
            self._comes.append(list(comes))
            self._goes.append(list(goes))
        self._pools = pipeline.staging(max(map(len, self._places)))
        tables = [
            rows._replace(
                pages=[
                    [places.get(page, -1) for page in table]
                    for places, table in zip(self._places, rows.pages, strict=True)
                ]
            )
            for rows in batch
        ]
        self._attention = pipeline.decoder.planned(tables, self._pools)

    def attend(self, group: int, at: int, joined: Tensor, out: Tensor) -> None:
        """Attend in layer `at` of a group; keys and values are copied back to host pages beside the next work."""
        host, staging, places = self._host[group], self._pools[group], self._places[group]
        comes, goes = self._comes[group], self._goes[group]
        # Copies run in order: the previous layer's copies ran after its attention, so the staging pages are free.
        with self._link.copying(after=False, before=True):
            copy_pages(host, comes, at, staging, [places[page] for page in comes], 0)
        self._attention.attend(group, 0, joined, out)
        with self._link.copying(after=True, before=False):
            copy_pages(staging, [places[page] for page in goes], 0, host, goes, at)


def _pages_of(rows: SequenceInput, group: int, window: int | None) -> tuple[list[int], list[int]]:
    """Return a group's physical pages with earlier tokens that rows may see, and the pages to which rows write."""
    table, first, last = rows.pages[group], rows.positions[0], rows.positions[-1]
    low = 0 if window is None else max(0, first - window + 1)
    written: dict[int, int] = {}
    for position in rows.positions:
        written[position // PAGE] = written.get(position // PAGE, 0) + 1
    seen = [
        table[page]
        for page in range(low // PAGE, last // PAGE + 1)
        if table[page] >= 0
        and written.get(page, 0) < min((page + 1) * PAGE, last + 1) - page * PAGE
    ]
    return seen, [table[page] for page in written]


def _kind(rows: SequenceInput) -> Literal["device", "split", "staged", "host"]:
    """Return who attends to a sequence; ValueError if nobody can attend to pages in their tier."""
    if rows.home == "device":
        if rows.attended == "host":
            raise ValueError("pages at home on the device are attended to on the device")
        return "split" if rows.front else "device"
    if rows.front:
        raise ValueError("a sequence at home on the host has no front: all its pages are there")
    return "host" if rows.attended == "host" else "staged"


def _in_order(batch: Sequence[SequenceInput], flights: Sequence[_Flight]) -> Tensor:
    """Return the hidden states of all sub-batches in the order of the batch."""
    counts = [len(rows.tokens) for rows in batch]
    pieces: dict[int, Tensor] = {}
    for flight in flights:
        begin = 0
        for index in flight.order:
            pieces[index] = flight.rows[begin : begin + counts[index]]
            begin += counts[index]
    return torch.cat([pieces[index] for index in range(len(batch))]) if batch else torch.empty(0)
