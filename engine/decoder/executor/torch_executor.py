"""The executor of a loaded model: runs the engine's batches on one device, with a decoder and its page pools."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from common import log
from common.errors import ConfigError
from common.native.library import cpu_flags
from common.pages.identity import PAGE
from common.transport.memory_segment import MemorySegment
from common.types.helper_address import HelperAddress
from common.types.model_card import ModelCard
from common.types.pages import PageForm
from engine.decoder.executor import interface as border
from engine.decoder.executor.host_attention import HostAttention, HostAttentionThread
from engine.decoder.executor.interface import ModelShape, SampledToken, SequenceInput, StepFailed
from engine.decoder.executor.page_copier import Int8Form, TorchPageCopier, TorchPageLoads
from engine.decoder.executor.passage_placer import (
    PassageNotFinite,
    PassagePlacer,
    precomputable,
)
from engine.decoder.executor.stage_pipeline import StagePipeline
from engine.decoder.sampling.sampler import UndrawnRow, draw_tokens, is_plain
from engine.host.helped_attention import HelpedAttention, helped
from engine.kernels.page_arrival import PageArrival
from engine.kernels.page_memory import (
    LAYOUT,
    TOUCHED,
    PageMemory,
    host_page_count,
    page_bytes,
    page_count,
    segment_bytes,
)
from engine.models.decoders.compiled_decoder import (
    CompiledDecoder,
    WeightKind,
    load_kernels,
    serves,
)
from engine.models.decoders.cuda_graphs import GraphedDecoder, graphed
from engine.models.decoders.files import DecoderFiles, find_decoder
from engine.models.decoders.torch_decoder import TorchDecoder
from engine.models.decoders.weights import HALF_NAMES, load_weights, stored_dtypes
from engine.models.gguf.weights import (
    StoredTensor,
    dequantised_weights,
    matrix_types,
    stored_weights,
)
from engine.torch_setup import set_up_torch

# The data type of pages and activations, by the kind of the weights.
_DTYPES: dict[WeightKind, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
    "stored": torch.bfloat16,
}
# The rounding of weights changes the pages that they compute, so it is part of the fingerprint.
_ROUNDED: dict[WeightKind, str] = {
    "int8": "int8 by 32",
    "int4": "int4 values, scaled and shifted by 32",
    "stored": "stored, int8 by 32",
}
PASSAGE_BYTES = 256 << 20  # for passages that were computed alone, unless configured
_log = log.get("engine")


class StepRows(NamedTuple):
    """A sequence's rows as far as plans of attention need them."""

    positions: Sequence[int]
    pages: Sequence[Sequence[int]]
    long: bool = False


class TorchExecutor:
    """A loaded generator (see `Executor`); only one thread may compute, any thread may read its properties."""

    def __init__(
        self,
        files: DecoderFiles,
        decoder: TorchDecoder | GraphedDecoder | CompiledDecoder,
        pools: Sequence[PageMemory],
        host: Sequence[PageMemory],
        *,
        dtype: WeightKind,
        threads: int,
        form: PageForm = "exact",
        host_attention: HostAttention | None = None,
        passage_bytes: int = PASSAGE_BYTES,
    ) -> None:
        """`host_attention` attends to the pages of `host`, which must be packed; `close` closes it.

        Passages that were computed alone are kept in `passage_bytes` of the host's memory.
        """
        self._files = files
        self._decoder = decoder
        self._pools = list(pools)
        self._host = list(host)
        self.stages: StagePipeline | None = None
        self.attended: dict[border.LocalTier, int] = {"device": 0, "host": 0}
        if host_attention is not None:
            staged = decoder.plain if isinstance(decoder, GraphedDecoder) else decoder
            self.stages = StagePipeline(staged, pools, host, host_attention)
            self.attended = self.stages.attended
        # Pages that change their home in a step must not be written before the step copies them.
        self._placer: PassagePlacer | None = None
        if host_attention is None and precomputable(files.spec):
            alone = decoder.plain if isinstance(decoder, GraphedDecoder) else decoder
            self._placer = PassagePlacer(alone, self._pools[0], passage_bytes)
        self.precomputes = self._placer is not None
        self.passages: border.PassageCounts | None = None
        if self._placer is not None:
            self.passages = self._placer.store
        self._threads = threads
        self.name = files.name
        self.dtype: str = dtype
        self.device = decoder.device.type
        self.exact = isinstance(decoder, CompiledDecoder)
        # Pages restored from a lossy form differ from computed pages, so the fingerprint differs, and with it the ids.
        computed = _ROUNDED.get(dtype, dtype)
        kept = computed if form == "exact" else f"{computed}, {form} below the host"
        self.fingerprint = files.fingerprint(kv_dtype=kept, layout=LAYOUT)
        self.stop_ids = list(files.stop_ids)
        self.grammars = bool(self.stop_ids)
        pages = min(pool.pages for pool in pools)
        places = {
            layer: (group, at)
            for group, pool in enumerate(pools)
            for at, layer in enumerate(pool.layers)
        }
        self.copier: border.PageCopier | None = None
        if host:
            lossy = None if form == "exact" else Int8Form(pools[0].data.dtype, files.spec.head_dim)
            order = [places[n] for n in range(len(places))]
            self.copier = TorchPageCopier(pools, host, order, decoder.arrival, lossy)
        self.shape = ModelShape(
            windows=[pool.window for pool in pools],
            page_bytes=[page_bytes(files.spec, len(pool.layers), _DTYPES[dtype]) for pool in pools],
            pages=pages,
            context=min(files.context, pages * PAGE),
            vocabulary=files.spec.vocabulary,
            host_pages=min((pool.pages for pool in host), default=0),
        )

    @classmethod
    def load(
        cls,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int = 0,
        kv_bytes: int = 0,
        host_bytes: int | None = 0,
        exact: bool = False,
        compiled: bool = True,
        form: PageForm = "exact",
        host_threads: int = 0,
        host_cores: Sequence[int] = (),
        helper: HelperAddress | None = None,
        passage_bytes: int = PASSAGE_BYTES,
    ) -> TorchExecutor:
        """Load a generator by directory, GGUF file, `spillway-demo`, or downloaded hub id; ConfigError if it fails.

        `dtype` auto means bf16 where the weights are stored in 16 bits and the device computes bf16 natively, else
        fp32; the compiled kernels keep a GGUF file's weights as stored. `threads` 0 takes all cores that affinity and
        cgroup allow. `kv_bytes` 0 and `host_bytes` None take shares of the free memory; `host_bytes` 0 means no host
        tier. `exact` demands that a row's bits do not depend on other rows, which holds for the compiled kernels and
        not for torch; without `compiled` torch computes. With `host_threads` that number of threads, on `host_cores`
        (empty: all), attends to the pages of sequences at home on the host; a helper that attaches at the address
        `helper`, if given, attends in their place. Passages that were computed alone are kept in `passage_bytes` of the
        host's memory.
        """
        if exact and form != "exact":
            raise ConfigError(
                f"SPILLWAY_PAGE_FORM is {form!r} and SPILLWAY_EXACT is on: pages in that form are not what was "
                "computed; expected exact, or SPILLWAY_EXACT off"
            )
        files = find_decoder(model)
        # Read here, so that a damaged tokenizer fails at the start instead of at the first request.
        files.tokenizer_json()
        if device not in {"auto", "cpu", "cuda"}:
            raise ConfigError(
                f"device {device!r}: a generator runs on cpu or cuda; expected one of them"
            )
        place, threads = set_up_torch(device, threads)
        chosen = _dtype(files, dtype, place, compiled=compiled)
        kernels = _kernels(files, chosen, place, exact=exact, compiled=compiled)
        decoder = _decoder(files, chosen, place, kernels, threads)
        with torch.inference_mode():
            pools, host, segment = _memory(
                files, _DTYPES[chosen], place, kv_bytes, host_bytes,
                packed=kernels is not None, packed_host=kernels is not None or host_threads > 0,
            )  # fmt: skip
        attention: HostAttention | None = None
        if host_threads:
            compute = kernels or (load_kernels() if serves(files.spec) else None)
            if compute is None or segment is None:
                raise ConfigError(
                    "attention on the host: needs the compiled kernels for this model, and pages on the host; "
                    "expected a C++ compiler here, and SPILLWAY_HOST_KV_BYTES above 0"
                )
            attention = HostAttentionThread(
                compute, files.spec, host, threads=host_threads, cores=host_cores
            )
            if helper is not None:
                attention = helped(attention, helper, files.spec, host, segment, threads=threads)
        _log.info("generator_loaded", model=files.name, dtype=chosen, compiled=kernels is not None)
        return cls(
            files, decoder, pools, host, dtype=chosen, threads=threads, form=form,
            host_attention=attention, passage_bytes=passage_bytes,
        )  # fmt: skip

    def execute(
        self,
        batch: Sequence[SequenceInput],
        loading: border.PageLoads | None = None,
        early: border.EarlyEnd | None = None,
    ) -> list[SampledToken | None]:
        """Run one step over all sequences and draw where asked, in the batch's order (see `Executor`)."""
        if not batch:
            return []
        self._set_threads()
        if not any(rows.places for rows in batch):
            return self._execute(batch, loading, early)
        self._place(batch)
        at = [index for index, rows in enumerate(batch) if rows.tokens]
        found: list[SampledToken | None] = [None] * len(batch)
        try:
            drawn = self._execute([batch[index] for index in at], loading, early) if at else []
        except StepFailed as error:
            raise StepFailed(at[error.index], str(error), error.code) from error
        for index, token in zip(at, drawn, strict=True):
            found[index] = token
        return found

    def _place(self, batch: Sequence[SequenceInput]) -> None:
        """Write the passages of a batch to their places; StepFailed for a passage that is not finite."""
        if self._placer is None:
            raise ValueError(f"model {self.name}: its passages cannot be computed alone here")
        with torch.inference_mode():
            for index, rows in enumerate(batch):
                for place in rows.places:
                    try:
                        self._placer.place(place, rows.pages[0])
                    except PassageNotFinite as error:
                        raise StepFailed(index, f"model {self.name}: {error}") from error

    def _execute(
        self,
        batch: Sequence[SequenceInput],
        loading: border.PageLoads | None,
        early: border.EarlyEnd | None,
    ) -> list[SampledToken | None]:
        """Run one step over sequences that have rows."""
        drawn = self._greedy(batch, loading, early)
        if drawn is not None:
            return drawn
        draw = partial(self._draw, loading=loading)
        return border.draw_several(batch, draw, early)

    def execute_staged(
        self,
        batch: Sequence[SequenceInput],
        loading: border.PageLoads | None = None,
        moves: border.HomeMoves | None = None,
    ) -> list[SampledToken | None]:
        """Run one step in stages (see `StagedExecutor`); ValueError if this executor cannot attend on the host."""
        self._set_threads()
        with torch.inference_mode():
            return self._drawn(batch, self._compute_staged(batch, loading, moves))

    @property
    def on_both(self) -> int:
        """The rows to which both tiers attended (see `StagedExecutor`)."""
        return 0 if self.stages is None else self.stages.on_both

    @property
    def stage_times(self) -> Sequence[border.StageTime]:
        """The timed stages of the last step in stages."""
        return [] if self.stages is None else self.stages.times

    @property
    def host_layers(self) -> Mapping[border.AttendedBy, int]:
        """The sub-batch layers attended on the host, counted by who attended; empty if no helper may attach."""
        attention = None if self.stages is None else self.stages.attention
        return attention.layers if isinstance(attention, HelpedAttention) else {}

    @property
    def helper_link(self) -> border.HelperLink | None:
        """The link to the attached helper; None without a helper."""
        attention = None if self.stages is None else self.stages.attention
        return attention.link if isinstance(attention, HelpedAttention) else None

    def _set_threads(self) -> None:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def _greedy(
        self,
        batch: Sequence[SequenceInput],
        loading: border.PageLoads | None,
        early: border.EarlyEnd | None,
    ) -> list[SampledToken | None] | None:
        """Draw by one kernel call if all rows are decoded greedily; None otherwise, or if a number is not finite."""
        decoder, ahead = self._decoder, len(batch[0].ahead)
        if not isinstance(decoder, CompiledDecoder):
            return None
        draws = [(*([rows.sample] if rows.sample else []), *rows.ahead) for rows in batch]
        if not all(
            len(rows.tokens) == 1 and not rows.drafts and len(some) == 1 + ahead and all(map(is_plain, some))
            for rows, some in zip(batch, draws, strict=True)
        ):  # fmt: skip
            return None
        self._check_tokens(batch)
        found = decoder.greedy(
            [rows.tokens[0] for rows in batch],
            [StepRows(rows.positions, rows.pages, rows.long) for rows in batch],
            self._pools,
            [[draw.banned for draw in some] for some in zip(*draws, strict=True)],
            arrival=_arrival(loading),
            early=None if early is None else early.flag,
        )
        if found is None:
            return None
        return [
            SampledToken(first, 0.0, [], tuple(SampledToken(token, 0.0, []) for token in more))
            for first, *more in zip(*found, strict=True)
        ]

    def _draw(
        self, batch: Sequence[SequenceInput], loading: border.PageLoads | None
    ) -> list[SampledToken | None]:
        """Compute the rows of a batch and draw where asked, except for tokens `ahead`."""
        with torch.inference_mode():
            return self._drawn(batch, self._compute(batch, loading))

    def _drawn(self, batch: Sequence[SequenceInput], hidden: Tensor) -> list[SampledToken | None]:
        """Draw where asked from the hidden states of a batch."""
        if not batch:
            return []
        ends = list(accumulate(len(rows.tokens) for rows in batch))
        self._check(hidden, ends, batch)
        asked = [
            (index, ends[index] - len(rows.drafts) - 1 + at, draw)
            for index, rows in enumerate(batch)
            if rows.sample
            for at, draw in enumerate((rows.sample, *rows.drafts))
        ]
        logits = self._decoder.logits(hidden[[row for _, row, _ in asked]])
        self._check_logits(logits, [index for index, _, _ in asked], batch)
        try:
            found = iter(draw_tokens(logits, [draw for _, _, draw in asked]))
        except UndrawnRow as error:
            raise StepFailed(asked[error.row][0], str(error), "grammar_failed") from error
        return [
            None
            if rows.sample is None
            else border.run_of(rows, list(islice(found, 1 + len(rows.drafts))))
            for rows in batch
        ]

    def logits(self, batch: Sequence[SequenceInput]) -> Tensor:
        """Run one step and return fp32 logits (rows, vocabulary) of all its rows, drawing nothing: for tests."""
        if any(rows.places for rows in batch):
            self._place(batch)
        with torch.inference_mode():
            return self._decoder.logits(self._compute(batch))

    def staged_logits(
        self, batch: Sequence[SequenceInput], moves: border.HomeMoves | None = None
    ) -> Tensor:
        """Run one step in stages and return fp32 logits as `logits` does: for tests."""
        with torch.inference_mode():
            return self._decoder.logits(self._compute_staged(batch, None, moves))

    def close(self) -> None:
        """Close the attention on the host and the copier of pages, if there are any; their threads end."""
        if self.copier is not None:
            self.copier.close()
        if self.stages is not None:
            self.stages.attention.close()

    def card(self, *, created_ms: int, partitions: int) -> ModelCard:
        """Return the model's card, from which the router renders, tokenizes and names families."""
        files = self._files
        return ModelCard(
            name=self.name,
            kind="generate",
            family=f"chat.{self.name}",
            fingerprint=self.fingerprint,
            dimension=0,
            max_tokens=self.shape.context,
            vocabulary=self.shape.vocabulary,
            partitions=partitions,
            created_ms=created_ms,
            chat_template=files.chat_template,
            grounding_template=files.grounding_template,
            reads=files.reads,
            bos=files.bos,
            eos=files.eos,
            stop_ids=self.stop_ids,
            sampling=files.sampling,
            grammars=self.grammars,
            precomputes=self.precomputes,
        )

    def tokenizer_json(self) -> bytes:
        """Return the tokenizer, without truncation and padding."""
        return self._files.tokenizer_json()

    def _compute(
        self, batch: Sequence[SequenceInput], loading: border.PageLoads | None = None
    ) -> Tensor:
        """Return the hidden states of all rows."""
        self._check_tokens(batch)
        queries = [StepRows(rows.positions, rows.pages, rows.long) for rows in batch]
        tokens = torch.tensor(
            [token for rows in batch for token in rows.tokens], device=self._decoder.device
        )
        return self._decoder.hidden(tokens, queries, self._pools, _arrival(loading))

    def _compute_staged(
        self,
        batch: Sequence[SequenceInput],
        loading: border.PageLoads | None,
        moves: border.HomeMoves | None,
    ) -> Tensor:
        """Return the hidden states of all rows, computed in stages."""
        if self.stages is None:
            raise ValueError(f"model {self.name}: this executor has no attention on the host")
        if any(rows.ahead or rows.places for rows in batch):
            raise ValueError("a step in stages draws no tokens ahead, and places no passages")
        self._check_tokens(batch)
        return self.stages.hidden(batch, _arrival(loading), moves)

    def _check_tokens(self, batch: Sequence[SequenceInput]) -> None:
        """Raise ValueError for tokens outside the vocabulary, or for more or fewer tokens than positions."""
        vocabulary = self.shape.vocabulary
        for index, rows in enumerate(batch):
            if len(rows.tokens) != len(rows.positions):
                raise ValueError(
                    f"sequence {index}: {len(rows.tokens)} tokens at {len(rows.positions)} positions"
                )
            if not all(0 <= token < vocabulary for token in rows.tokens):
                raise ValueError(f"sequence {index}: a token id outside 0 to {vocabulary - 1}")

    def _check(self, hidden: Tensor, ends: Sequence[int], batch: Sequence[SequenceInput]) -> None:
        """Raise StepFailed if a row is not finite, and clear this step's keys and values of that row's sequence.

        A row attends to itself, so K or V that is not finite shows in its hidden state. If such values stayed in a
        page, they would spoil the next sequence that gets the page.
        """
        bad = _not_finite(hidden)
        if not bad:
            return
        owners = [bisect.bisect_right(ends, row) for row in bad]
        for owner in set(owners):
            pools = self._pools if batch[owner].home == "device" else self._host
            at = torch.tensor(batch[owner].positions, device=pools[0].data.device)
            for pool, table in zip(pools, batch[owner].pages, strict=True):
                pages = torch.tensor(table, device=at.device)[at // PAGE]
                pool.clear(pool.slots(pages, at % PAGE))
        positions = batch[owners[0]].positions
        raise StepFailed(
            owners[0],
            f"model {self.name}: the hidden states at positions {positions[0]} to {positions[-1]} are not finite "
            "(NaN or infinity)",
        )

    def _check_logits(
        self, logits: Tensor, asked: Sequence[int], batch: Sequence[SequenceInput]
    ) -> None:
        bad = _not_finite(logits)
        if bad:
            index = asked[bad[0]]
            position = int(batch[index].positions[-1])
            raise StepFailed(
                index,
                f"model {self.name}: the logits at position {position} are not finite (NaN or infinity)",
            )


def _kernels(
    files: DecoderFiles, dtype: WeightKind, place: torch.device, *, exact: bool, compiled: bool
) -> CDLL | None:
    """Return the compiled kernels, or None to compute by torch; ConfigError if the settings need missing kernels."""
    served = compiled and place.type == "cpu" and serves(files.spec)
    kernels = load_kernels() if served else None
    if kernels is None and (exact or dtype in {"int8", "int4", "stored"}):
        why = "SPILLWAY_EXACT" if exact else f"chat_dtype {dtype!r}"
        raise ConfigError(
            f"{why}: needs the compiled kernels of the CPU, which are not to be had for this model on "
            f"{place.type}; expected a C++ compiler here, or another setting"
        )
    return kernels


def _decoder(
    files: DecoderFiles,
    dtype: WeightKind,
    place: torch.device,
    kernels: CDLL | None,
    threads: int,
) -> TorchDecoder | GraphedDecoder | CompiledDecoder:
    """Load the weights into a decoder: the compiled one if there are kernels, else torch's."""
    if files.gguf is not None and kernels is not None and dtype == "stored":
        return CompiledDecoder(
            files.spec, stored_weights(files.gguf, files.spec), kernels, kind=dtype, threads=threads
        )
    # Weights that the kernels quantise are read as stored; fp16 is widened.
    as_stored = kernels is not None and _stored_types(files) <= {"BF16"}
    small = dtype in {"int8", "int4"}
    stored = torch.float32 if small and not as_stored else _DTYPES[dtype]
    if files.gguf is not None:
        weights = dequantised_weights(files.gguf, files.spec, dtype=stored, device=place)
    else:
        weights = load_weights(files.spec, files.weights, dtype=stored, device=place)
    with torch.inference_mode():
        if kernels is None:
            return graphed(TorchDecoder(files.spec, weights))
        packed: dict[str, Tensor | StoredTensor] = {**weights}
        weights.clear()
        return CompiledDecoder(files.spec, packed, kernels, kind=dtype, threads=threads)


def _stored_types(files: DecoderFiles) -> set[str]:
    """Return the data types of the stored matrices; safetensors and GGUF share the names (F32, BF16, F16)."""
    return stored_dtypes(files.weights) if files.gguf is None else matrix_types(files.gguf)


def _memory(
    files: DecoderFiles,
    dtype: torch.dtype,
    place: torch.device,
    kv_bytes: int,
    host_bytes: int | None,
    *,
    packed: bool,
    packed_host: bool,
) -> tuple[list[PageMemory], list[PageMemory], MemorySegment | None]:
    """Return each layer group's page memory on the device and on the host, and the host's segment, if any."""
    spec = files.spec
    pages = page_count(spec, kv_bytes, dtype=dtype, device=place)
    pools = [
        PageMemory(
            spec,
            window,
            layers,
            pages,
            dtype=dtype,
            device=place,
            packed=packed,
            touched=TOUCHED // len(spec.groups),
        )
        for window, layers in spec.groups
    ]
    below = host_page_count(
        host_bytes, pages, sum(page_bytes(spec, len(pool.layers), dtype) for pool in pools)
    )
    cpu = torch.device("cpu")
    if not below:
        return pools, [], None
    size = segment_bytes(spec, below, dtype)
    try:
        segment = MemorySegment(size)
    except OSError as error:
        raise ConfigError(
            f"{size} bytes of host memory for KV pages: {error.strerror}; expected another SPILLWAY_HOST_KV_BYTES"
        ) from error
    host = [
        PageMemory(
            spec,
            window,
            layers,
            below,
            dtype=dtype,
            device=cpu,
            segment=segment,
            packed=packed_host,
        )
        for window, layers in spec.groups
    ]
    return pools, host, segment


def _arrival(loading: border.PageLoads | None) -> PageArrival | None:
    return loading.arrival if isinstance(loading, TorchPageLoads) else None


def _not_finite(rows: Tensor) -> list[int]:
    """Return the rows that hold NaN or infinity, found by the sum of all rows first, then by sums of each row."""
    if math.isfinite(rows.sum()):
        return []
    found: list[int] = (~torch.isfinite(rows.sum(dim=-1))).nonzero()[:, 0].tolist()
    return found


def _dtype(files: DecoderFiles, dtype: str, place: torch.device, *, compiled: bool) -> WeightKind:
    for known in _DTYPES:
        if dtype == known != "stored":
            return known
    if dtype != "auto":
        raise ConfigError(f"chat_dtype {dtype!r}: expected auto, fp32, bf16, int8, int4")
    kept = files.gguf is not None and _stored_types(files) != {"F32"}
    if kept and compiled and place.type == "cpu" and serves(files.spec):
        return "stored" if load_kernels() is not None else "fp32"
    native = place.type == "cuda" or "bf16" in cpu_flags()
    half = (place.type == "cuda" and files.gguf is not None) or _stored_types(files) <= HALF_NAMES
    return "bf16" if native and half else "fp32"
