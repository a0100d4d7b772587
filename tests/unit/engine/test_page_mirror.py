"""A helper on another machine attends to what the gpu_worker has, whoever wrote it, and gets no page twice."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.pages.identity import PAGE
from common.transport.memory_segment import MemorySegment
from engine.decoder.executor.torch_executor import StepRows
from engine.host.channel import StepTables
from engine.host.page_mirror import PageMirror
from engine.kernels.attention_plan import lay_out
from engine.kernels.page_memory import PageMemory, segment_bytes, store_layer, unpack
from tests.support.host_sides import DIM, KV_HEADS, decoder_spec

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T = TypeVar("T")
PAGES, TURNS, MOST = 16, 25, 5 * PAGE


class HeldPages(NamedTuple):
    """A sequence: its pages, the same in both groups, and how many tokens it has."""

    pages: list[int]
    tokens: int


class _Pair:
    """A worker's pages and a helper's copy, both written as the two processes write them."""

    def __init__(self, seed: int) -> None:
        self.draw, spec, dtype = random.Random(seed), decoder_spec(), torch.bfloat16
        segment = MemorySegment(segment_bytes(spec, PAGES, dtype))
        self.ours, self.theirs = (
            [
                PageMemory(
                    spec, window, layers, PAGES, dtype=dtype, device=torch.device("cpu"), packed=True, segment=each
                )
                for window, layers in spec.groups
            ]
            for each in (segment, None)
        )  # fmt: skip
        self.mirror = PageMirror(self.ours)
        self.window = next(pool.window for pool in self.ours if pool.window)
        self.held: list[HeldPages] = []
        self.free = list(range(PAGES))
        self.sent = 0
        torch.manual_seed(seed)

    def begin(self) -> None:
        """Write the pages of a new sequence as a whole, as prompts and moves do."""
        tokens = self.draw.randint(1, MOST)
        count = -(-tokens // PAGE)
        if count > len(self.free):
            return
        self.draw.shuffle(self.free)
        pages, self.free = self.free[:count], self.free[count:]
        for pool in self.ours:
            for layer in range(len(pool.layers)):
                store_layer(pool, pages, layer, torch.randn(count, *pool.data.shape[2:]).bfloat16())
        self.held.append(HeldPages(pages, tokens))

    def end(self) -> None:
        """Free the pages of a sequence, after its last rows were cleared, perhaps."""
        if self.held:
            gone = self.held.pop(self.draw.randrange(len(self.held)))
            if self.draw.random() < 0.3:
                for pool in self.ours:
                    pool.clear(pool.slots(torch.tensor(gone.pages[-1:]), torch.tensor([0])))
            self.free += gone.pages

    def shorten(self) -> None:
        """Take back the last tokens of a sequence: its next rows go where those were."""
        if self.held:
            at = self.draw.randrange(len(self.held))
            pages, tokens = self.held[at]
            tokens = max(1, tokens - self.draw.randint(1, 3))
            self.free += pages[-(-tokens // PAGE) :]
            self.held[at] = HeldPages(pages[: -(-tokens // PAGE)], tokens)

    def decode(self) -> None:
        """Decode a row of some sequences: with the helper, without it, or with it until it is late."""
        chosen = [at for at in range(len(self.held)) if self.draw.random() < 0.7]
        queries = []
        for at in chosen:
            pages, tokens = self.held[at]
            if tokens % PAGE == 0:
                if not self.free:
                    return
                pages = [*pages, self.free.pop()]
            self.held[at] = HeldPages(pages, tokens + 1)
            first = max(0, tokens - self.window + 1) // PAGE
            seen = [page if n >= first else -1 for n, page in enumerate(pages)]
            order = (pages, seen) if self.ours[1].window else (seen, pages)
            queries.append(StepRows([tokens], order))
        if not queries:
            return
        found = lay_out(queries, self.ours)
        tables = [table.astype(np.int32) for table in found.tables]
        step = StepTables(found.positions, found.ends, tables, found.starts)
        layers = sum(len(pool.layers) for pool in self.ours)
        by_helper = self.draw.choice((0, layers, layers, self.draw.randrange(layers)))
        places = [
            (group, layer)
            for group, pool in enumerate(self.ours)
            for layer in range(len(pool.layers))
        ]
        for number, (group, layer) in enumerate(places):
            if number == by_helper:
                self.mirror.missed(step)  # this and the other layers are this process'
            self._append(step, group, layer, helped=number < by_helper)

    def _append(self, step: StepTables, group: int, layer: int, *, helped: bool) -> None:
        needs = self.mirror.needs(step)[group]
        rows = torch.randn(2, len(needs.row_pages), KV_HEADS, DIM).bfloat16()
        ours, theirs = self.ours[group], self.theirs[group]
        places = torch.from_numpy(needs.row_pages), torch.from_numpy(needs.offsets)
        ours.write(layer, ours.slots(*places), *rows)
        if not helped:
            return
        lacking = np.flatnonzero(self.mirror.lacking(group, layer, needs))
        pages, data = self.mirror.read(group, layer, needs, lacking)
        self.sent += len(pages)
        raw = theirs.raw()
        raw[pages, layer] = np.frombuffer(data, np.uint8).reshape(len(pages), raw.shape[2])
        self.mirror.appended(group, layer, needs)
        theirs.write(layer, theirs.slots(*places), *rows)
        for page, tokens in zip(needs.pages, needs.tokens, strict=True):
            left, right = (
                unpack(pool.data[page, layer])[..., :tokens, :] for pool in (ours, theirs)
            )
            assert torch.equal(left, right)


@given(st.integers(0, 1 << 32))
def test_a_helper_has_what_it_attends_to(seed: int) -> None:
    """Sequences come, grow on either side, lose tokens and go: every token that is attended to is the worker's."""
    pair = _Pair(seed)
    for _ in range(TURNS):
        pair.draw.choice((pair.begin, pair.begin, pair.end, pair.shorten, *4 * [pair.decode]))()


class _Always(random.Random):
    """Draws so that every sequence has a row in every step, and the helper attends to all layers."""

    def random(self) -> float:
        return 0.0

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        return seq[1]


def test_no_page_is_sent_twice() -> None:
    """A sequence that the helper attends to sends its pages once, and again only what others have written."""
    pair = _Pair(1)
    pair.held.append(HeldPages([3, 5], 50))
    pair.free = [7, 8]
    pair.draw = _Always(1)
    pair.decode()
    layers = sum(len(pool.layers) for pool in pair.ours)
    assert pair.sent == 2 * layers
    for _ in range(40):
        pair.decode()
    assert pair.sent == 2 * layers
    pair.ours[0].written([5], 0)
    pair.decode()
    assert pair.sent == 2 * layers + 1
