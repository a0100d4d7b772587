"""The encoder or cross-encoder: token lists in, vectors or scores out, on one device in one precision."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from common.cost.linear import LinearCost
from common.errors import InvalidRequest
from common.types.model_card import ModelCard
from engine.encoder.model import Floats
from engine.kernels.encoder import EncoderKernels
from engine.models.encoders.dense import DenseLayer
from engine.models.encoders.files import ModelFiles, find
from engine.models.encoders.packed_forward import PackedForward, packable
from engine.models.encoders.precision import EncoderPrecision, Forward, choose
from engine.models.encoders.torch_forward import TorchForward
from engine.models.encoders.weights import load_weights
from engine.torch_setup import set_up_torch


class Encoder:
    """A loaded model: one thread may compute, a second one with what `beside` returns; any may read its properties."""

    def __init__(
        self,
        files: ModelFiles,
        weights: dict[str, Tensor],
        forward: Forward,
        *,
        device: torch.device,
        precision: EncoderPrecision,
        threads: int,
    ) -> None:
        self._files = files
        self._spec = files.spec
        self._forward = forward
        self._device = device
        self._threads = threads
        self._head = {
            name: tensor.to(device)
            for name, tensor in weights.items()
            if name.startswith(("pooler.", "classifier"))
        }
        self.name = files.name
        self.fingerprint = files.fingerprint()
        self.dtype: str = precision
        self.known_cost: LinearCost | None = None
        # Each text is computed this many times; more than once imitates a slower device, for tests and demonstrations.
        self.times = 1
        self.device = device.type
        self.max_tokens = files.max_tokens
        self._dense = [DenseLayer(layer, device) for layer in files.dense]
        self.dimension = files.dense[-1].outputs if files.dense else files.spec.hidden

    @classmethod
    def load(
        cls,
        model: str = "",
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int = 0,
        cache: Path | None = None,
    ) -> Encoder:
        """Load a model by directory, hub id or alias ("" is MiniLM).

        `dtype` auto takes the fastest precision within the accuracy bound, measured once and remembered in `cache`;
        `threads` 0 takes all cores that affinity and cgroup allow. ConfigError names a setting that cannot be met.
        """
        files = find(model)
        place, threads = set_up_torch(device, threads)
        weights = load_weights(files)

        precisions = _precisions(files, weights, place, threads, cache.parent if cache else None)
        precision: EncoderPrecision = "bf16 packed" if "bf16 packed" in precisions else "bf16"
        if dtype == "auto":
            precision = choose(files, precisions, place, cache)
        elif dtype == "fp32":
            precision = "fp32"
        with torch.inference_mode():
            built = precisions[precision]()
        return cls(files, weights, built, device=place, precision=precision, threads=threads)

    @property
    def reranks(self) -> bool:
        """True for a cross-encoder, which can `score` pairs."""
        return self._spec.labels > 0

    def tokenizer_json(self) -> bytes:
        """Return the tokenizer, without truncation and padding."""
        return self._files.tokenizer_json()

    def card(self, *, created_ms: int = 0, partitions: int = 1) -> ModelCard:
        """Return the model's card, from which the router tokenizes and names families."""
        kind: Literal["embed", "rerank"] = "rerank" if self.reranks else "embed"
        return ModelCard(
            name=self.name,
            kind=kind,
            family=f"{kind}.{self.name}",
            fingerprint=self.fingerprint,
            dimension=self.dimension,
            max_tokens=self.max_tokens,
            vocabulary=self._spec.vocabulary,
            partitions=partitions,
            pair_separator=self._spec.family == "xlmr",
            prompts=self._files.prompts,
            default_prompt=self._files.default_prompt,
            query_prompt=self._files.query_prompt,
            document_prompt=self._files.document_prompt,
            created_ms=created_ms,
        )

    def beside(self) -> Encoder | None:
        """Return the encoder for a second thread, with the same weights and one core; None on an accelerator."""
        if self._device.type != "cpu":
            return None
        found = copy.copy(self)
        found._threads = 1
        return found

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        """Raise InvalidRequest for a text that is empty, too long, or outside the vocabulary."""
        for index, text in enumerate(texts):
            if not 0 < len(text) <= self.max_tokens:
                raise InvalidRequest(
                    f"text {index} has {len(text)} tokens; model {self.name} takes 1 to {self.max_tokens}",
                    param="input",
                )
            if min(text) < 0 or max(text) >= self._spec.vocabulary:
                raise InvalidRequest(
                    f"text {index} has a token id outside 0 to {self._spec.vocabulary - 1}, "
                    f"the vocabulary of model {self.name}",
                    param="input",
                )

    def encode(self, texts: Sequence[Sequence[int]]) -> Floats:
        """Return one float32 row per token list, in the same order; every list must pass `check`."""
        spec = self._spec
        with self._computing():
            last = spec.normalise and not self._dense
            for _ in range(self.times):
                vectors = self._forward.pooled(texts, None, spec.pooling, normalise=last)
            for layer in self._dense:
                vectors = layer(vectors)
            if self._dense and spec.normalise:
                vectors = F.normalize(vectors)
            found: Floats = vectors.cpu().numpy()
        return found

    def score(self, pairs: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Floats:
        """Return a cross-encoder's raw score for each joined pair; `types` are token types, empty: all 0."""
        if self._spec.labels != 1:
            raise InvalidRequest(f"model {self.name} is not a cross-encoder with one score")
        kinds = types if types and self._spec.types > 1 else None
        with self._computing():
            first = self._forward.pooled(pairs, kinds, "cls", normalise=False)
            found: Floats = self._classify(first)[:, 0].cpu().numpy()
        return found

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            yield

    def _classify(self, first: Tensor) -> Tensor:
        inner, outer = (
            ("pooler.dense", "classifier")
            if self._spec.family == "bert"
            else ("classifier.dense", "classifier.out_proj")
        )
        hidden = torch.tanh(self._linear(first, inner))
        return self._linear(hidden, outer)

    def _linear(self, rows: Tensor, name: str) -> Tensor:
        return F.linear(rows, self._head[f"{name}.weight"], self._head[f"{name}.bias"])


def _precisions(
    files: ModelFiles,
    weights: dict[str, Tensor],
    place: torch.device,
    threads: int,
    directory: Path | None,
) -> dict[EncoderPrecision, Callable[[], Forward]]:
    """Return functions that build the model in each precision that this machine supports."""
    precisions: dict[EncoderPrecision, Callable[[], Forward]] = {
        "fp32": lambda: TorchForward(files.spec, weights, "fp32", place),
        "bf16": lambda: TorchForward(files.spec, weights, "bf16", place),
    }
    if place.type == "cpu" and packable(files.spec):
        kernels = EncoderKernels.load(directory)
        if kernels is not None:
            precisions["bf16 packed"] = lambda: PackedForward(files.spec, weights, kernels, threads)
    return precisions
