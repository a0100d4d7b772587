"""L6: every family of generators in the compiled step, beside Llama at the same sizes: bytes of weights a second."""

from __future__ import annotations

import ctypes
import math
from statistics import median
from typing import Any

import torch

from bench.document import BenchOptions, Body
from bench.pairs import LEAST, measure_pairs
from bench.suites.engine_pairs import told
from common.devices import detect
from common.errors import ConfigError
from common.pages.identity import PAGE
from engine.decoder.executor.torch_executor import StepRows
from engine.kernels.page_memory import PageMemory
from engine.models.decoders.compiled_decoder import CompiledDecoder, WeightKind, load_kernels
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.spec import DecoderSpec
from engine.models.decoders.weights import wanted
from loadgen import stats

CONTEXT, TOKENS = 64, 16
KINDS: tuple[WeightKind, ...] = ("bf16", "int8", "int4")
# Bytes of a weight, with its share of a scale for 32 of them.
_BYTES: dict[WeightKind, float] = {"bf16": 2.0, "int8": 34 / 32, "int4": 18 / 32}
# Shape M, in every family.
_SIZES = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 2048, "vocab_size": 8192, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = "llama"
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 512},
    "phi3": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.125, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "smollm3": {},
}


class Stream:
    """One stream of a random model, decoded greedily from the same context over and over."""

    def __init__(
        self, spec: DecoderSpec, weights: dict[str, torch.Tensor], kind: WeightKind, kernels: ctypes.CDLL, threads: int
    ) -> None:  # fmt: skip
        self.nbytes = weight_bytes(spec, kind)
        self._decoder = CompiledDecoder(spec, dict(weights), kernels, kind=kind, threads=threads)
        pages = (CONTEXT + TOKENS) // PAGE + 1
        self._pools = [
            PageMemory(
                spec, window, layers, pages, dtype=torch.bfloat16, device=torch.device("cpu"), packed=True
            )
            for window, layers in spec.groups
        ]  # fmt: skip
        self._query = StepRows([CONTEXT], [list(range(pages))] * len(self._pools))

    def speak(self, _number: int = 0) -> None:
        """Compute the tokens; ConfigError if a number is not finite."""
        nothing: list[list[list[int]]] = [[[]]] * TOKENS
        if self._decoder.greedy([1], [self._query], self._pools, nothing) is None:
            raise ConfigError("L6: a number is not finite; expected random weights that stay so")


def spec_of(family: str) -> DecoderSpec:
    """Return the specification of shape M in a family."""
    own = FAMILIES.get(family, {})
    return parse_decoder({"model_type": family, **_SIZES, **own}, where="L6")


def weight_bytes(spec: DecoderSpec, kind: WeightKind) -> float:
    """Return the bytes of matrices that a token reads, the tied head among them."""
    matrices = [shape for _, shape in wanted(spec) if len(shape) == 2]
    return sum(map(math.prod, matrices)) * _BYTES[kind]


def random_weights(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """Return small random matrices, and norms of 1."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) / 50
        for name, shape in wanted(spec)
    }


def run(options: BenchOptions) -> Body:
    """Measure each family and Llama in pairs, at every kind of weights."""
    kernels, threads = load_kernels(), detect().usable_cores
    if kernels is None:
        raise ConfigError("L6: there are no compiled kernels here; expected a C++ compiler")
    torch.set_num_threads(threads)
    body, spec = Body(), spec_of(LLAMA)
    weights = random_weights(spec)
    plain = {kind: Stream(spec, weights, kind, kernels, threads) for kind in KINDS}
    rows: dict[WeightKind, list[list[str]]] = {kind: [] for kind in KINDS}
    shares: dict[WeightKind, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for family in FAMILIES:
        spec = spec_of(family)
        weights = random_weights(spec)
        for kind in KINDS:
            stream = Stream(spec, weights, kind, kernels, threads)
            blocks = measure_pairs(
                stream.speak, plain[kind].speak, pairs=options.rounds(100, LEAST)
            )
            size = stream.nbytes / plain[kind].nbytes
            pairs = zip(blocks.ours, blocks.theirs, strict=True)
            shares[kind].append(stats.interval([size * b / a for a, b in pairs]))
            rows[kind].append(
                [
                    family, told(shares[kind][-1]), f"{TOKENS / median(blocks.ours):.1f}",
                    f"{TOKENS / median(blocks.theirs):.1f}", f"{len(blocks.ours)} ({blocks.dropped})",
                ]
            )  # fmt: skip
            body.samples[f"{family}, {kind}"] = blocks.samples()
    columns = ["family", "by Llama [95 %]", "tokens/s", "Llama tokens/s", "pairs (blocks dropped)"]
    for kind in KINDS:
        body.table(f"{kind}, one stream", columns, rows[kind])
        worst = min(shares[kind], key=lambda share: share["value"])
        body.met[f"worst family, {kind}"] = stats.verdict(worst, 0.8, 0.8)
    body.notes.append(
        f"{threads} threads; random weights of shape M (hidden 768, 12 layers, 12 heads on 4, inner 2048, vocabulary "
        f"8,192, tied), {TOKENS} tokens from position {CONTEXT} on in one call. A family with more matrices "
        "may take longer for them: bytes of weights a second are compared, not tokens."
    )
    return body
