"""The precision of an encoder, chosen by measurement: the fastest whose vectors are close enough to those of fp32."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from common.clock import SYSTEM, Clock
from common.native.library import cpu_flags
from engine.models.encoders.files import ModelFiles
from engine.models.encoders.spec import Pooling

MIN_COSINE = 0.9995
MEDIAN_COSINE = 0.9999
_ROUNDS = 5
_PROBE = """A spillway is what a dam has for the water that does not fit.
Requests that would miss their deadline on the accelerator are sent to the processors beside it, where they
 are computed by the same model, and the answers are the same within a stated tolerance.
def close(self): Close the file. A closed file cannot be used for further I/O operations.
The cat sat on the mat, and the kitten slept on the rug; meanwhile the bond market fell by 3.2 %.
Return a new list containing all items from the iterable in ascending order. A custom key function can be
 supplied to customize the sort order, and the reverse flag can be set to request the result in descending
 order. The sort is guaranteed to be stable.
Why is the sky blue?
Invoice 20931: 14 crates of oranges, delivered 2024-03-08 to Rotterdam, paid.
Error: connection refused (os error 111)""".replace("\n ", " ").splitlines()


EncoderPrecision = Literal["fp32", "bf16", "bf16 packed"]


class Forward(Protocol):
    """The forward pass of one model in one precision, on one device."""

    def pooled(
        self,
        texts: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None,
        pooling: Pooling,
        *,
        normalise: bool,
    ) -> Tensor:
        """Return fp32 (texts, hidden), a vector for each text; texts may be in any order, `types` None means 0."""


def choose(
    files: ModelFiles,
    precisions: Mapping[EncoderPrecision, Callable[[], Forward]],
    device: torch.device,
    cache: Path | None = None,
    clock: Clock = SYSTEM,
) -> EncoderPrecision:
    """Return the fastest of `precisions` on this machine that keeps the accuracy bound against fp32.

    The choice for the same weights, processor, threads and torch is kept in `cache`.
    """
    machine = f"{device.type} {cpu_flags()} {torch.get_num_threads()} torch {torch.__version__}"
    key = f"{files.fingerprint()} {sorted(precisions)} {machine}"
    known = _remembered(cache).get(key)
    if known is not None:
        return known
    texts = _probe(files)
    with torch.inference_mode():
        built = {precision: build() for precision, build in precisions.items()}
        states = {precision: _means(forward, texts) for precision, forward in built.items()}
        exact = states["fp32"]
        allowed = [
            precision
            for precision in precisions
            if precision == "fp32" or _accurate(exact, states[precision])
        ]
        best = dict.fromkeys(allowed, float("inf"))
        for _ in range(_ROUNDS):  # in turns, so that a busy moment of the machine hits all
            for precision in allowed:
                best[precision] = min(
                    best[precision], _seconds(built[precision], texts, device, clock)
                )
    chosen = min(allowed, key=lambda precision: best[precision])
    _remember(cache, key, chosen)
    return chosen


def _accurate(exact: Tensor, vectors: Tensor) -> bool:
    cosine = F.cosine_similarity(exact, vectors, dim=1)
    return bool(cosine.min() >= MIN_COSINE and cosine.median() >= MEDIAN_COSINE)


def _means(forward: Forward, texts: list[list[int]]) -> Tensor:
    """Return the mean-pooled vectors of texts; the call also warms the forward pass."""
    return forward.pooled(texts, None, "mean", normalise=False)


def _seconds(forward: Forward, texts: list[list[int]], device: torch.device, clock: Clock) -> float:
    started_s = clock.perf_s()
    _means(forward, texts)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock.perf_s() - started_s


def _probe(files: ModelFiles) -> list[list[int]]:
    from tokenizers import Tokenizer  # noqa: PLC0415 - only this measurement needs it

    tokenizer = Tokenizer.from_str(files.tokenizer_json().decode())
    vocabulary = files.spec.vocabulary
    texts = [
        [min(token, vocabulary - 1) for token in encoding.ids[: files.max_tokens]]
        for encoding in tokenizer.encode_batch(_PROBE)
    ]
    return sorted((text for text in texts if text), key=len)


def _remembered(cache: Path | None) -> dict[str, EncoderPrecision]:
    if cache is None:
        return {}
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = content if isinstance(content, dict) else {}
    return {key: value for key, value in known.items() if value in get_args(EncoderPrecision)}


def _remember(cache: Path | None, key: str, chosen: EncoderPrecision) -> None:
    if cache is None:
        return
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps({**_remembered(cache), key: chosen}), encoding="utf-8")
    except OSError:
        return  # without the cache the next start only measures again
