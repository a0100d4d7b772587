"""CUDA graphs of decode steps: one launch computes a step, from buffers at fixed addresses.

A step of single rows is padded to the next size with copies of its first row, which write the same keys and values
to the same place again. There is a graph for each size and each number of chunks of pages, captured at its first use.
Steps with a prompt's rows are computed without a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.pages.identity import PAGE
from engine.kernels.attention_plan import QueryRows
from engine.kernels.page_arrival import PageArrival
from engine.kernels.page_memory import PageMemory
from engine.models.decoders.torch_decoder import TorchDecoder

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class _Step(NamedTuple):
    """A captured step: its input buffers, the function that runs it, and its output buffer."""

    tokens: Tensor
    groups: list[Any]
    run: Callable[[], object]
    hidden: Tensor


def graphed(decoder: TorchDecoder) -> TorchDecoder | GraphedDecoder:
    """Return the decoder with CUDA graphs for its decode steps where CUDA and Triton exist; else the decoder itself."""
    if decoder.device.type == "cuda":
        with contextlib.suppress(ImportError):
            from engine.kernels.triton_attention import plan_blocks  # noqa: PLC0415 - on CUDA only

            return GraphedDecoder(decoder, plan_blocks)
    return decoder


class GraphedDecoder:
    """A decoder that computes decode steps by CUDA graphs; the next step overwrites the result of `hidden`."""

    def __init__(self, decoder: TorchDecoder, plan: Callable[..., Sequence[Any]]) -> None:
        """`decoder` attends with Triton; `plan` is `triton_attention.plan_blocks`."""
        self._decoder, self._plan = decoder, plan
        self._steps: dict[tuple[int, int], _Step] = {}
        self._memory: Any = None

    @property
    def plain(self) -> TorchDecoder:
        """The decoder without graphs."""
        return self._decoder

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._decoder.device

    def logits(self, rows: Tensor) -> Tensor:
        """Return fp32 logits (rows, vocabulary) of rows that `hidden` returned."""
        return self._decoder.logits(rows)

    def arrival(self) -> PageArrival:
        """Return the count of layers whose pages have arrived, for a step of this model to wait on."""
        return self._decoder.arrival()

    def hidden(
        self,
        tokens: Tensor,
        queries: Sequence[QueryRows],
        pools: Sequence[PageMemory],
        arrival: PageArrival | None = None,
    ) -> Tensor:
        """Compute rows as `TorchDecoder.hidden` does; ValueError for the same reasons."""
        count = len(queries)
        single = all(len(query.positions) == 1 for query in queries)
        if count > SIZES[-1] or not single or arrival is not None:
            return self._decoder.hidden(tokens, queries, pools, arrival)
        size = next(size for size in SIZES if size >= count)
        spec = self._decoder.spec
        filled = [*queries, *[queries[0]] * (size - count)]
        host = torch.device("cpu")
        planned = self._plan(filled, pools, spec.heads // spec.kv_heads, host)
        chunks = 1 << (max(group.chunks for group in planned) - 1).bit_length()
        step = self._steps.get((size, chunks))
        if step is None:
            step = self._steps[size, chunks] = self._step(size, chunks, planned, pools)
        step.tokens[:count].copy_(tokens)
        step.tokens[count:] = tokens[0]
        for there, now in zip(step.groups, planned, strict=True):
            for name in ("slots", "positions", "tables", "blocks"):
                values = getattr(now, name)
                getattr(there, name)[: len(values)].copy_(self._pinned(values), non_blocking=True)
        _copy_long(planned[0].long, step.groups[0].long)
        step.run()
        return step.hidden[:count]

    def _step(
        self, size: int, chunks: int, planned: Sequence[Any], pools: Sequence[PageMemory]
    ) -> _Step:
        """Make the buffers of a step, filled with its plan, and capture the step."""
        device, groups = self.device, []
        # One buffer for all layer groups; a model without long frequencies needs none.
        switches = self._decoder.spec.short_context > 0
        long = torch.zeros(size, dtype=torch.bool, device=device) if switches else None
        _copy_long(planned[0].long, long)
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        for group in planned:
            # Room for each row's pages: those of the model's whole context, and one more.
            tables = group.tables.new_zeros(size * (self._decoder.spec.positions // PAGE + 1))
            tables[: len(group.tables)] = group.tables
            there = (group.slots, group.positions, tables, group.blocks)
            slots, positions, tables, blocks = (each.to(device).clone() for each in there)
            groups.append(
                group._replace(
                    slots=slots,
                    positions=positions,
                    tables=tables,
                    blocks=blocks,
                    chunks=chunks,
                    long=long,
                )
            )

        def compute() -> Tensor:
            return self._decoder.run(tokens, groups, pools)

        hidden = compute()  # compiles kernels that are not compiled yet
        if device.type != "cuda":  # a rehearsal: the same buffers, no graph
            return _Step(tokens, groups, lambda: hidden.copy_(compute()), hidden)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may copy pages during the capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            hidden = compute()
        self._memory = graph.pool()
        return _Step(tokens, groups, graph.replay, hidden)

    def _pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values


def _copy_long(now: Tensor | None, there: Tensor | None) -> None:
    """Copy the marks of rows of long texts to a step's buffer, if the model has such a buffer."""
    if there is not None and now is None:
        there.zero_()
    elif there is not None and now is not None:
        there.copy_(now)
