"""Passages computed alone: each behind its text's first token, its keys turned to its place, and kept for other texts.

So a passage knows nothing of what stands before it in its text, which is an approximation; but its keys and values are
the same wherever it stands, up to the rotation of the keys, and need to be computed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.pages.identity import PAGE
from engine.decoder.executor.interface import PassagePlace
from engine.decoder.kv.passage_store import PassageStore
from engine.kernels.page_memory import PageMemory, read_layer, unpack
from engine.models.decoders.compiled_decoder import CompiledDecoder
from engine.models.decoders.rope import RopeSpec
from engine.models.decoders.rotary import angles, frequencies, rotate
from engine.models.decoders.spec import DecoderSpec
from engine.models.decoders.torch_decoder import TorchDecoder

_CPU = torch.device("cpu")


class _Alone(NamedTuple):
    """The rows of a passage and of the token before it, as far as plans of attention need them."""

    positions: Sequence[int]
    pages: Sequence[Sequence[int]]
    long: bool = False


class PassageNotFinite(Exception):
    """The error of a passage whose keys or values are NaN or infinite; it is neither placed nor kept."""


def precomputable(spec: DecoderSpec) -> bool:
    """Return whether a model's keys can be turned to another place, and mean the same there.

    All layers must rotate their keys, by angles that do not depend on the text's length, and see the whole text.
    """
    return None not in spec.ropes and not any(spec.windows) and not spec.short_context


class PassagePlacer:
    """Computes passages by one decoder, which only its thread may use, and puts them into pages.

    What was computed is kept in `store`, in this machine's memory: per passage (layers, 2, tokens, kv heads, dim), of
    the pages' data type, with the keys as they are at the positions from 1 on. A passage is computed in a step of its
    own, so that its bits depend on its tokens alone, whether it is found in the store or computed again.
    """

    def __init__(
        self, decoder: TorchDecoder | CompiledDecoder, pool: PageMemory, most_bytes: int
    ) -> None:
        """`pool` is the only pool of a model that is `precomputable`; the store holds at most `most_bytes`."""
        self._decoder, self._pool = decoder, pool
        self.store = PassageStore[Tensor](most_bytes, lambda passage: passage.nbytes)

    def place(self, place: PassagePlace, table: Sequence[int]) -> None:
        """Write the keys and values of a part of a passage to the pages of `table`, of its sequence's positions.

        PassageNotFinite if the passage's keys or values are.
        """
        key = _key(place)
        passage = self.store.get(key)
        if passage is None:
            passage = self._computed(place.tokens)
            self.store.put(key, passage)
        part = passage[:, :, place.start - place.begin : place.end - place.begin]
        device = self._pool.data.device
        put(
            self._pool,
            self._decoder.spec.ropes,
            table,
            place.start,
            part.to(device),
            place.begin - 1,
        )

    def _computed(self, tokens: Sequence[int]) -> Tensor:
        """Return the keys and values of all tokens but the first, computed by themselves."""
        pool, decoder = self._pool, self._decoder
        pages = list(range(-(-len(tokens) // PAGE)))
        scratch = PageMemory(
            decoder.spec,
            pool.window,
            pool.layers,
            len(pages),
            dtype=pool.data.dtype,
            device=pool.data.device,
            packed=pool.packed,
        )
        ids = torch.tensor(list(tokens), device=decoder.device)
        decoder.hidden(ids, [_Alone(list(range(len(tokens))), [pages])], [scratch])
        layers = [taken(scratch, pages, layer, len(tokens)) for layer in range(len(pool.layers))]
        passage = torch.stack(layers).to(_CPU).contiguous()
        if not torch.isfinite(passage).all():
            raise PassageNotFinite(
                f"the keys or values of a passage of {len(tokens) - 1} tokens are not finite (NaN or infinity)"
            )
        return passage


def taken(pool: PageMemory, pages: Sequence[int], layer: int, count: int) -> Tensor:
    """Return keys and values, (2, count - 1, kv heads, dim), of `count` tokens of pages without the first."""
    found = unpack(read_layer(pool, pages, layer, _CPU))  # (pages, 2, kv heads, PAGE, dim)
    return torch.stack([half.transpose(1, 2).flatten(0, 1)[1:count] for half in found.unbind(1)])


def put(
    pool: PageMemory,
    ropes: Sequence[RopeSpec | None],
    table: Sequence[int],
    start: int,
    passage: Tensor,
    turn: int,
) -> None:
    """Write a passage (layers, 2, tokens, kv heads, dim) to the positions from `start` on of a sequence's pages.

    Its keys are turned on by `turn` positions. `ropes` are the rotations of the model's layers.
    """
    device = pool.data.device
    at = torch.arange(start, start + passage.shape[2], device=device)
    slots = pool.slots(torch.tensor(list(table), device=device)[at // PAGE], at % PAGE)
    rotations: dict[RopeSpec, Tensor] = {}
    for layer, number in enumerate(pool.layers):
        keys, values = passage[layer]
        rope = ropes[number]
        assert rope is not None
        if rope not in rotations:
            inverse = frequencies(rope, keys.shape[-1])
            rotations[rope] = angles(torch.tensor([turn]), inverse, 1.0, torch.float32).to(device)
        turned = rotate(keys.float(), rotations[rope])
        pool.write(layer, slots, turned.to(keys.dtype).contiguous(), values.contiguous())


def _key(place: PassagePlace) -> bytes:
    tokens = np.asarray(place.tokens, np.uint32).tobytes()
    return hashlib.blake2b(place.root + tokens, digest_size=16).digest()
