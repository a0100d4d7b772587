"""The compiled decoder: a whole step on the CPU in one C++ call, with packed weights and paged attention.

A row's result has the same bits in any batch, chunking and page placement, and with any number of threads: this is
exact mode, which costs nothing here. Tests compare this decoder with `torch_decoder`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.native.finder import open_first, open_library
from engine.kernels.attention_plan import QueryRows, lay_out
from engine.kernels.page_arrival import PageArrival
from engine.kernels.page_memory import PageMemory
from engine.kernels.partial import Partial
from engine.kernels.sources import DECODER
from engine.kernels.two_sides import SplitRows, front_sides, rest_sides
from engine.models.decoders.rotary import frequencies
from engine.models.decoders.spec import DecoderSpec
from engine.models.decoders.weights import EMBED, HEAD, embed_scale, norm_names
from engine.models.gguf.weights import StoredTensor

WeightKind = Literal["fp32", "bf16", "int8", "int4", "stored"]
WIDEST_HEAD, MOST_SHARED = 512, 64  # dimensions of a head; query heads on one head of K and V
_KINDS: dict[WeightKind, int] = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
_STORED = {
    "F32": 0, "BF16": 1, "F16": 4, "Q8_0": 5, "Q4_0": 6, "Q4_K": 7, "Q6_K": 8, "IQ4_NL": 9, "IQ4_XS": 10, "Q4_1": 11,
    "Q5_0": 12, "Q5_1": 13, "Q5_K": 14,
}  # fmt: skip
PAGE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 4}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_QKV, _OUT, _GATE_UP, _DOWN, _HEAD, _TABLE = range(6)
# Numbers of norms; numbers 0 to 3 are a layer's, in the order of `LayerNorms`.
_Q_NORM, _K_NORM, _LAST = range(4, 7)
_FRONT, _REST = 1, 2  # the sides of sequences, as numbered in `attention.h`
_int64 = ctypes.c_int64


class _Heads(ctypes.Structure):
    """The heads' sizes and factors, laid out as the struct in `attention.h`."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


class _Shape(ctypes.Structure):
    """A model's sizes and factors, laid out as the struct in `step.cpp`."""

    _fields_ = (
        ("heads", _Heads),
        ("layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("embed_scale", ctypes.c_float),
        ("residual_scale", ctypes.c_float),
        ("logit_scale", ctypes.c_float),
        ("logit_cap", ctypes.c_float),
    )


class _Pages(ctypes.Structure):
    """One layer group's pages, laid out as the struct in `attention.h`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("layers", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
    )


def load_kernels() -> ctypes.CDLL | None:
    """Return the decoder's kernels for this processor, or None if they cannot be built or loaded."""
    return _typed(open_first(DECODER))


def open_kernels(path: Path) -> ctypes.CDLL | None:
    """Return the kernels in a library, or None if it cannot be opened."""
    return _typed(open_library(path))


def _typed(library: ctypes.CDLL | None) -> ctypes.CDLL | None:
    """Name the results of the kernels' functions that are not ints."""
    if library is not None:
        library.spillway_model.restype = ctypes.c_void_p
        library.spillway_pack.restype = ctypes.c_void_p
        library.spillway_pack_stored.restype = ctypes.c_void_p
        library.spillway_weight_bytes.restype = ctypes.c_int64
        library.spillway_work.restype = ctypes.c_void_p
        library.spillway_plan.restype = ctypes.c_void_p
        library.spillway_free.restype = None
        library.spillway_read.restype = ctypes.c_float
        library.spillway_greedy.restype = ctypes.c_int64
    return library


def serves(spec: DecoderSpec) -> bool:
    """True if the kernels can compute a model of this shape."""
    return spec.head_dim <= WIDEST_HEAD and spec.heads // spec.kv_heads <= MOST_SHARED


class CompiledDecoder:
    """A loaded model without pages, which every call receives as an argument. Not thread-safe."""

    device = torch.device("cpu")

    def __init__(
        self,
        spec: DecoderSpec,
        weights: dict[str, Tensor | StoredTensor],
        kernels: ctypes.CDLL,
        *,
        kind: WeightKind,
        threads: int,
    ) -> None:
        """Pack fp32 or bf16 weights with the names and shapes of `weights.wanted`; packed weights leave the dict.

        For int8 and int4 the weights are quantised here, with a scale for every 32 inputs of an output, and for int4
        also a shift. Matrices of a GGUF file (`stored`) are packed in the file's format. ConfigError if memory is
        short.
        """
        self.spec, self._kernels, self._threads = spec, kernels, threads
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        shape = _Shape(
            _heads(spec), spec.layers, spec.hidden, spec.intermediate, _ACTIVATIONS[spec.activation],
            spec.epsilon, embed_scale(spec, dtype), spec.residual_scale, spec.logit_scale,
            spec.logit_cap,
        )  # fmt: skip
        self._model = ctypes.c_void_p(kernels.spillway_model(ctypes.byref(shape)))
        weakref.finalize(self, kernels.spillway_free, self._model)
        embed = weights.pop(EMBED)
        if isinstance(embed, Tensor):
            # A copy: a tensor from a file holds the whole file in memory.
            embed = self._embed = embed.clone()
            kernels.spillway_table(self._model, _at(embed), _half(embed))
        elif not spec.tied:
            self._linear(0, _TABLE, kind, [embed], [])
        self._place()
        for layer in range(spec.layers):
            self._layer(layer, weights, kind)
        self._norm(0, _LAST, weights.pop("model.norm.weight"), spec.norm_offset)
        self._linear(0, _HEAD, kind, [weights.pop(HEAD, embed)], [])

    @property
    def weight_bytes(self) -> int:
        """The bytes that the packed matrices take."""
        taken: int = self._kernels.spillway_weight_bytes(self._model)
        return taken

    def arrival(self) -> PageArrival:
        """Return the count of layers whose pages have arrived, for a step of this model to wait on."""
        pages_ready = self._kernels.spillway_pages_ready
        return PageArrival(
            self.spec.layers, lambda flag, layers: pages_ready(ctypes.byref(flag), _int64(layers))
        )

    def hidden(
        self,
        tokens: Tensor,
        queries: Sequence[QueryRows],
        pools: Sequence[PageMemory],
        arrival: PageArrival | None = None,
    ) -> Tensor:
        """Compute rows (rows,) of token ids and write their K and V; return fp32 (rows, hidden) before the last norm.

        Each layer waits until its pages have arrived. ValueError if positions do not rise or a page that a row needs is
        missing.
        """
        step = _Step(queries, pools)
        out = torch.empty(len(step.positions), self.spec.hidden)
        self._kernels.spillway_step(
            self._model,
            *step.rows(tokens),
            step.long(),
            *step.sequences(),
            _int64(len(pools)),
            step.pages,
            None if arrival is None else ctypes.byref(arrival.flag),
            _at(out),
            self._threads,
        )
        return out

    def greedy(
        self,
        tokens: Sequence[int],
        queries: Sequence[QueryRows],
        pools: Sequence[PageMemory],
        banned: Sequence[Sequence[Sequence[int]]],
        *,
        arrival: PageArrival | None = None,
        early: ctypes.c_int64 | None = None,
    ) -> list[list[int]] | None:
        """Draw several tokens of each sequence greedily: compute a row, take the likeliest token, and repeat.

        The result is (tokens, rows), with as many tokens as `banned` (tokens, rows, ids), whose ids are never drawn, or
        fewer if `early` becomes other than 0. None if a number is not finite. ValueError if a row's page is missing.
        """
        count, rows = len(banned), len(tokens)
        step = _Step(queries, pools, reach=count - 1)
        ids = np.array([token for some in banned for each in some for token in each], np.int64)
        starts = np.cumsum([0, *(len(each) for some in banned for each in some)], dtype=np.int64)
        out = np.empty((count, rows), np.int64)
        first = np.array(tokens, np.int64)
        drawn: int = self._kernels.spillway_greedy(
            self._model,
            _int64(rows),
            ctypes.c_void_p(first.ctypes.data),
            ctypes.c_void_p(step.positions.ctypes.data),
            step.long(),
            _int64(len(pools)),
            step.pages,
            None if arrival is None else ctypes.byref(arrival.flag),
            _int64(count),
            ctypes.c_void_p(starts.ctypes.data),
            ctypes.c_void_p(ids.ctypes.data),
            None if early is None else ctypes.byref(early),
            ctypes.c_void_p(out.ctypes.data),
            self._threads,
        )
        if drawn < 0:
            return None
        found: list[list[int]] = out[:drawn].tolist()
        return found

    def begin(self, tokens: Tensor, positions: Tensor, long: Tensor | None = None) -> CompiledState:
        """Begin a step that is computed stage by stage, with rows (rows,) of token ids at positions (rows,).

        `long` (rows,) marks the rows of long texts; None: no row.
        """
        rows = (tokens, positions, long)
        return CompiledState(self, self._kernels, self._model, self._threads, rows)

    def planned(
        self, queries: Sequence[QueryRows], pools: Sequence[PageMemory]
    ) -> PlannedAttention:
        """Plan the attention of a step that is computed stage by stage (see `PlannedAttention`)."""
        return PlannedAttention(self._kernels, self.spec, queries, pools, threads=self._threads)

    def planned_rest(
        self, queries: Sequence[SplitRows], pools: Sequence[PageMemory]
    ) -> PlannedRest:
        """Plan attention to the pages after fronts that are attended elsewhere (see `PlannedRest`)."""
        return PlannedRest(self._kernels, self.spec, queries, pools, threads=self._threads)

    def logits(self, rows: Tensor) -> Tensor:
        """Return fp32 logits (rows, vocabulary) of rows that `hidden` returned."""
        out = torch.empty(len(rows), self.spec.vocabulary)
        if len(rows):
            rows = rows.contiguous()
            self._kernels.spillway_logits(
                self._model, _int64(len(rows)), _at(rows), _at(out), self._threads
            )
        return out

    def _place(self) -> None:
        """Pass each layer's place in its layer group, and its rotation, to the kernels."""
        rotations = self.spec.rotations
        for group, (_, layers) in enumerate(self.spec.groups):
            for at, layer in enumerate(layers):
                rope = self.spec.ropes[layer]
                turn = -1 if rope is None else rotations.index(rope)
                self._kernels.spillway_place(self._model, *map(_int64, (layer, group, at, turn)))
        for rope in rotations:
            short, long = (
                frequencies(rope, self.spec.head_dim, long=each).contiguous()
                for each in (False, True)
            )
            self._kernels.spillway_rope(
                self._model,
                _at(short),
                _at(long),
                _int64(len(short)),
                ctypes.c_float(rope.attention),
            )

    def _layer(
        self, layer: int, weights: dict[str, Tensor | StoredTensor], kind: WeightKind
    ) -> None:
        base, spec = f"model.layers.{layer}.", self.spec
        for which, norm in enumerate(norm_names(spec)):
            if norm is not None:
                weight = weights.pop(f"{base}{norm}.weight")
                self._norm(layer, which, weight, spec.norm_offset)
        attention = base + "self_attn."
        if spec.qk_norm:
            for which, norm in ((_Q_NORM, "q_norm"), (_K_NORM, "k_norm")):
                weight = weights.pop(f"{attention}{norm}.weight")
                self._norm(layer, which, weight, spec.norm_offset)
        for which, names in (
            (_QKV, [attention + f"{name}_proj" for name in "qkv"]),
            (_OUT, [attention + "o_proj"]),
            (_GATE_UP, [base + "mlp.gate_proj", base + "mlp.up_proj"]),
            (_DOWN, [base + "mlp.down_proj"]),
        ):
            matrices = [weights.pop(name + ".weight") for name in names]
            biases = [
                _vector(weights.pop(f"{name}.bias")) for name in names if f"{name}.bias" in weights
            ]
            self._linear(layer, which, kind, matrices, biases)

    def _norm(self, layer: int, which: int, stored: Tensor | StoredTensor, offset: float) -> None:
        weight = _vector(stored) + offset
        self._kernels.spillway_norm(
            self._model, _int64(layer), which, _at(weight), _int64(len(weight))
        )

    def _linear(
        self,
        layer: int,
        which: int,
        kind: WeightKind,
        matrices: Sequence[Tensor | StoredTensor],
        biases: Sequence[Tensor],
    ) -> None:
        bias = torch.cat(list(biases)) if biases else None
        if kind == "stored":
            stored = [each for each in matrices if isinstance(each, StoredTensor)]
            failed = self._pack_stored(layer, which, stored, bias)
        else:
            numbers = [each for each in matrices if isinstance(each, Tensor)]
            failed = self._pack(layer, which, kind, torch.cat(numbers), bias)
        if failed:
            raise ConfigError(f"there is no memory for the weights of layer {layer} as {kind}")

    def _pack(
        self, layer: int, which: int, kind: WeightKind, joined: Tensor, bias: Tensor | None
    ) -> int:
        failed: int = self._kernels.spillway_linear(
            self._model,
            _int64(layer),
            which,
            _KINDS[kind],
            _at(joined),
            _half(joined),
            _int64(joined.shape[0]),
            _int64(joined.shape[1]),
            None if bias is None else _at(bias),
            self._threads,
        )
        return failed

    def _pack_stored(
        self, layer: int, which: int, stored: Sequence[StoredTensor], bias: Tensor | None
    ) -> int:
        """Pack matrices that share their inputs; they may have different storage types."""
        count, rows = len(stored), [each.rows() for each in stored]
        failed: int = self._kernels.spillway_stored(
            self._model,
            _int64(layer),
            which,
            count,
            (ctypes.c_int * count)(*(_STORED[each.type] for each in stored)),
            (ctypes.c_void_p * count)(*(each.ctypes.data for each in rows)),
            (_int64 * count)(*(each.shape[0] for each in stored)),
            (_int64 * count)(*(each.shape[1] for each in rows)),
            _int64(stored[0].shape[1]),
            None if bias is None else _at(bias),
            self._threads,
        )
        return failed


class _Step:
    """The rows of a step as arguments of the kernels; keeps the memory that the kernels read."""

    def __init__(
        self,
        queries: Sequence[QueryRows],
        pools: Sequence[PageMemory],
        *,
        whole: bool = True,
        reach: int = 0,
    ) -> None:
        if not all(pool.packed for pool in pools):
            raise ValueError("the compiled kernels read packed pages; these are plain")
        step = lay_out(queries, pools, whole=whole, reach=reach)
        self.positions, self._ends, self._starts = step.positions, step.ends, step.starts
        self._long = step.long
        self._tables = [table.astype(np.int32) for table in step.tables]
        self.pages = (_Pages * len(pools))(
            *(
                _Pages(
                    pool.data.data_ptr(),
                    PAGE_KINDS[pool.data.dtype],
                    len(pool.layers),
                    pool.window or 0,
                    table.ctypes.data,
                    starts.ctypes.data,
                )
                for pool, table, starts in zip(pools, self._tables, self._starts, strict=True)
            )
        )

    def rows(self, of: Tensor) -> tuple[object, ...]:
        """Return the number of rows, their token ids, and their positions."""
        return _int64(len(self.positions)), _at(of), ctypes.c_void_p(self.positions.ctypes.data)

    def long(self) -> object:
        """Return the marks of rows of long texts, a byte each; None if there is no such row."""
        return None if self._long is None else ctypes.c_void_p(self._long.ctypes.data)

    def sequences(self) -> tuple[object, ...]:
        """Return the number of sequences, and the ends of their rows."""
        return _int64(len(self._ends)), ctypes.c_void_p(self._ends.ctypes.data)


class CompiledState:
    """The rows of a step between two stages; after the last stage `rows`, fp32 (rows, hidden), lack only a norm."""

    def __init__(
        self,
        decoder: CompiledDecoder,
        kernels: ctypes.CDLL,
        model: ctypes.c_void_p,
        threads: int,
        begun: tuple[Tensor, Tensor, Tensor | None],
    ) -> None:
        """`begun` are the rows' token ids, their positions, and the marks of rows of long texts."""
        tokens, positions, long = begun
        self._decoder, self._kernels, self._model = decoder, kernels, model
        self._threads, self._count = threads, _int64(len(tokens))
        self._work = ctypes.c_void_p(kernels.spillway_work())
        weakref.finalize(self, kernels.spillway_work_free, self._work)
        self.rows = torch.empty(len(tokens), decoder.spec.hidden)
        kernels.spillway_embed(
            model, self._work, self._count, _at(tokens), _at(positions),
            None if long is None else _at(long), _at(self.rows), threads,
        )  # fmt: skip

    def before(self, layer: int) -> Tensor:
        """Return queries, keys and values of a layer, rotated: fp32 (rows, heads + 2 * kv heads, dim)."""
        spec = self._decoder.spec
        joined = torch.empty(len(self.rows), spec.heads + 2 * spec.kv_heads, spec.head_dim)
        self._call(self._kernels.spillway_before, layer, self.rows, joined)
        return joined

    def after(self, layer: int, attended: Tensor) -> None:
        """Finish a layer, given the result of its attention, fp32 (rows, heads, dim): projection and MLP."""
        self._call(self._kernels.spillway_after, layer, attended, self.rows)

    def _call(self, stage: Any, layer: int, source: Tensor, target: Tensor) -> None:
        stage(
            self._model, self._work, _int64(layer), self._count, _at(source), _at(target),
            self._threads,
        )  # fmt: skip


class PlannedAttention:
    """Attention of a step over packed pages, planned once and called layer by layer, by one thread at a time.

    With `even` every thread gets an equal number of pages (NEO, section 4.3); else a thread that is done takes the next
    task. A row's bits are the same. ValueError if positions do not rise or a page that a row needs is missing.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        spec: DecoderSpec,
        queries: Sequence[QueryRows],
        pools: Sequence[PageMemory],
        *,
        threads: int,
        even: bool = False,
    ) -> None:
        self._kernels, self._pools = kernels, list(pools)
        self._planned = _Planned(kernels, spec, _Step(queries, pools), threads, even=even)

    def attend(self, group: int, at: int, joined: Tensor, out: Tensor) -> None:
        """Write keys and values to their pages and attend with the queries in layer `at` of a group.

        `joined` is fp32 (rows, heads + 2 * kv heads, dim), `out` (rows, heads, dim), both contiguous.
        """
        self._kernels.spillway_attend_planned(
            self._planned.handle, _int64(group), _int64(at), _at(joined), _at(out)
        )


class PlannedFront:
    """Attention of a step to the fronts of sequences, planned once; threads get equal numbers of pages.

    The result is to be merged with the other pages' by a `PlannedRest`. ValueError as in `front_sides`.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        spec: DecoderSpec,
        queries: Sequence[SplitRows],
        pools: Sequence[PageMemory],
        *,
        threads: int,
    ) -> None:
        self._kernels, self._pools = kernels, list(pools)
        self._planned = _plan_side(_FRONT, kernels, spec, queries, pools, threads)

    def attend(self, group: int, at: int, joined: Tensor, found: Partial) -> None:
        """Attend with the queries of fp32 `joined` (rows, heads + 2 * kv heads, dim), and write the result to `found`.

        No page is written.
        """
        self._kernels.spillway_attend_front(
            self._planned.handle, _int64(group), _int64(at), _at(joined), *map(_at, found)
        )


class PlannedRest:
    """Attention of a step to the pages after the fronts of sequences, planned once.

    Chunks of pages are merged in order, so a row has the bits that it has if all pages are in one tier. ValueError as
    in `rest_sides`.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        spec: DecoderSpec,
        queries: Sequence[SplitRows],
        pools: Sequence[PageMemory],
        *,
        threads: int,
    ) -> None:
        self._kernels, self._pools = kernels, list(pools)
        self._planned = _plan_side(_REST, kernels, spec, queries, pools, threads)
        self._group = 0  # of the last call of `attend`

    def attend(self, group: int, at: int, joined: Tensor) -> None:
        """Write keys and values to their pages and attend in layer `at` of a group, up to the merging.

        `joined` is fp32 (rows, heads + 2 * kv heads, dim), contiguous.
        """
        self._group = group
        self._kernels.spillway_attend_rest(
            self._planned.handle, _int64(group), _int64(at), _at(joined)
        )

    def join(self, front: Partial, out: Tensor) -> None:
        """Merge what the last call of `attend` found into the attention to the fronts; `out` is (rows, heads, dim)."""
        self._kernels.spillway_attend_join(
            self._planned.handle, _int64(self._group), *map(_at, front), _at(out)
        )


class _Planned:
    """A step's attention as the kernels have planned it, with the memory that they read; `handle` is freed with it.

    `side` is a side of the sequences' fronts, and the number of each front's pages.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        spec: DecoderSpec,
        step: _Step,
        threads: int,
        *,
        even: bool = False,
        side: tuple[int, Sequence[int]] = (0, ()),
    ) -> None:
        self._step, self._fronts = step, np.array(side[1], np.int64)
        self.handle = ctypes.c_void_p(
            kernels.spillway_plan(
                ctypes.byref(_heads(spec)),
                _int64(len(step.pages)),
                step.pages,
                _int64(len(step.positions)),
                ctypes.c_void_p(step.positions.ctypes.data),
                *step.sequences(),
                int(even),
                threads,
                side[0],
                ctypes.c_void_p(self._fronts.ctypes.data),
            )
        )
        weakref.finalize(self, kernels.spillway_plan_free, self.handle)


def _plan_side(
    side: int,
    kernels: ctypes.CDLL,
    spec: DecoderSpec,
    queries: Sequence[SplitRows],
    pools: Sequence[PageMemory],
    threads: int,
) -> _Planned:
    """Plan a step's attention to one side of the sequences' fronts; at fronts threads get equal numbers of pages."""
    rows = front_sides(queries, pools) if side == _FRONT else rest_sides(queries, pools)
    fronts = [each.front for each in queries]
    step = _Step(rows, pools, whole=False)
    return _Planned(kernels, spec, step, threads, even=side == _FRONT, side=(side, fronts))


class PackedLinear:
    """A single linear layer for tests and measurements; weights (outputs, inputs) are fp32, bf16 or as stored."""

    def __init__(
        self, kernels: ctypes.CDLL, weight: Tensor | StoredTensor, kind: WeightKind, threads: int
    ) -> None:
        """Pack the weights; ConfigError if memory is short."""
        self._kernels, self._threads = kernels, threads
        self.outputs, self.inputs = weight.shape
        sizes = (_int64(self.outputs), _int64(self.inputs))
        if isinstance(weight, StoredTensor):
            rows, number = weight.rows(), _STORED[weight.type]
            at = ctypes.c_void_p(rows.ctypes.data)
            packed = kernels.spillway_pack_stored(
                number, at, *sizes, _int64(rows.shape[1]), threads
            )
        else:
            weight = weight.contiguous()
            number = _KINDS[kind]
            packed = kernels.spillway_pack(number, _at(weight), _half(weight), *sizes, threads)
        if packed is None:
            raise ConfigError(f"there is no memory for {tuple(weight.shape)} weights as {kind}")
        self._packed = ctypes.c_void_p(packed)
        weakref.finalize(self, kernels.spillway_drop, self._packed)

    def numbers(self) -> Tensor:
        """Return the weights after packing, as fp32 (outputs, inputs)."""
        out = torch.empty(self.outputs, self.inputs)
        self._kernels.spillway_unpack(self._packed, _at(out))
        return out

    def __call__(self, rows: Tensor) -> Tensor:
        """Return fp32 (rows, outputs) of contiguous fp32 (rows, inputs)."""
        out = torch.empty(len(rows), self.outputs)
        self._kernels.spillway_multiply(
            self._packed, _int64(len(rows)), _at(rows), _at(out), self._threads
        )
        return out


def attend(
    kernels: ctypes.CDLL,
    q: Tensor,
    pool: PageMemory,
    layer: int,
    queries: Sequence[QueryRows],
    threads: int,
) -> Tensor:
    """Attend with fp32 rows (rows, heads, dim) over the packed pages of one layer, numbered within its group."""
    return _attend(kernels, q, pool, [layer], _Step(queries, [pool]), threads, partial=False).sums[
        0
    ]


def attend_layers(
    kernels: ctypes.CDLL,
    q: Tensor,
    pool: PageMemory,
    queries: Sequence[QueryRows],
    threads: int,
) -> Tensor:
    """Attend in all layers of a group, planned once as in a step; return (layers, rows, heads, dim)."""
    layers = range(len(pool.layers))
    return _attend(kernels, q, pool, layers, _Step(queries, [pool]), threads, partial=False).sums


def attend_partly(
    kernels: ctypes.CDLL,
    q: Tensor,
    pool: PageMemory,
    layer: int,
    queries: Sequence[QueryRows],
    threads: int,
) -> Partial:
    """Attend over the resident pages only (not -1 in the table); `merge` joins the results of disjoint pages."""
    step = _Step(queries, [pool], whole=False)
    found = _attend(kernels, q, pool, [layer], step, threads, partial=True)
    return Partial(*(each[0] for each in found))


def _attend(
    kernels: ctypes.CDLL,
    q: Tensor,
    pool: PageMemory,
    layers: Sequence[int],
    step: _Step,
    threads: int,
    *,
    partial: bool,
) -> Partial:
    q = q.contiguous()
    rows, heads, dim = q.shape
    sizes = (len(layers), rows, heads)
    found = Partial(torch.empty(*sizes, dim), torch.empty(sizes), torch.empty(sizes))
    kernels.spillway_attend(
        ctypes.byref(_Heads(heads, pool.kv_heads, dim, pool.scale, pool.cap)),
        step.pages,
        _int64(layers[0]),
        _int64(len(layers)),
        *step.rows(q),
        *step.sequences(),
        _at(found.sums),
        _at(found.row_max) if partial else None,
        _at(found.row_sum) if partial else None,
        threads,
    )
    return found


def _heads(spec: DecoderSpec) -> _Heads:
    return _Heads(spec.heads, spec.kv_heads, spec.head_dim, spec.attention_scale, spec.score_cap)


def _vector(stored: Tensor | StoredTensor) -> Tensor:
    tensor = stored if isinstance(stored, Tensor) else stored.numbers()
    return tensor.float().contiguous()


def _half(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
