"""Incremental decoding: one token at a time, with the keys and values of earlier ones kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from engine.models.retro.network import (
    EncodedNeighbours,
    RetroNetwork,
    SelfAttention,
    Turn,
    rotations,
)


class RetroDecoder:
    """The state of `batch` sequences of one length: kept keys and values, and the neighbours in effect.

    Memory is bounded by the network's window, whatever the length. Logits equal those of the network's `forward`.
    """

    def __init__(self, network: RetroNetwork, batch: int = 1) -> None:
        self._network = network
        config = network.config
        shape = (batch, config.heads, 2 * config.window, config.dim)
        self._keys = [torch.zeros(shape) for _ in range(config.layers)]
        self._values = [torch.zeros(shape) for _ in range(config.layers)]
        self._held = 0  # of the kept tokens; the last one is at `length` - 1
        self.length = 0
        self._neighbours: EncodedNeighbours | None = None
        self._point = 0

    def attend_to(self, neighbours: Tensor) -> None:
        """Have the next token read, and later ones, attend to these neighbours [batch, k, value].

        The next token read is the last one that was known when they were retrieved.
        """
        self._neighbours = self._network.encode(neighbours)
        self._point = self.length + 1

    def read(self, ids: Tensor) -> Tensor:
        """Read tokens [batch, tokens], a window of them at most; return logits [batch, tokens, vocabulary]."""
        network, config, tokens = self._network, self._network.config, ids.shape[1]
        self._make_room(tokens)
        places = torch.arange(self.length, self.length + tokens)
        turn = rotations(places, config.dim, config.theta)
        offsets = rotations(places - self._point, config.dim, config.theta)
        x, crossed = network.embed(ids), 0
        for index, layer in enumerate(network.blocks()):
            x = x + self._attend(index, layer.attention, x, turn)
            if layer.cross is not None and self._neighbours is not None:
                found = self._neighbours
                k, v = found.keys[crossed], found.values[crossed]
                x = x + layer.cross(x, offsets, k, v, found.seen)
                crossed += 1
            x = x + layer.feed(x)
        self._held += tokens
        self.length += tokens
        return network.logits(x)

    def _make_room(self, tokens: int) -> None:
        window = self._network.config.window
        if self._held + tokens <= 2 * window:
            return
        last = slice(self._held - min(self._held, window - 1), self._held)
        for kept in (*self._keys, *self._values):
            moved = kept[:, :, last].clone()
            kept[:, :, : moved.shape[2]] = moved
        self._held = last.stop - last.start

    def _attend(self, index: int, attention: SelfAttention, x: Tensor, turn: Turn) -> Tensor:
        q, k, v = attention.project(x, turn)
        window, held, end = self._network.config.window, self._held, self._held + x.shape[1]
        self._keys[index][:, :, held:end] = k
        self._values[index][:, :, held:end] = v
        begin = max(0, held + 1 - window)
        keys, values = self._keys[index][:, :, begin:end], self._values[index][:, :, begin:end]
        if end - held == 1:
            return attention.join(F.scaled_dot_product_attention(q, keys, values))
        back = torch.arange(held, end)[:, None] - torch.arange(begin, end)
        near = (back >= 0) & (back < window)
        return attention.join(F.scaled_dot_product_attention(q, keys, values, attn_mask=near))
