"""First weights from which copying is learned early: random, but not independent of each other.

Some heads of the first layers look one to three tokens back. In cross-attention some heads begin with a query of the
current token and keys of the tokens before a neighbour's, so that what followed the same tokens in a neighbour is
attended to from the start, and its value begins as that token's own embedding. Nothing of the world is in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from engine.models.retro.network import (
    CrossAttention,
    NeighbourLayer,
    RetroConfig,
    RetroNetwork,
    SelfAttention,
)

POSITIONAL: Final = 6  # the fastest rotations of each head; the others serve content
LOOKS_BACK: Final = 3
SCALE: Final = 0.03
Read = tuple[
    Tensor, Tensor
]  # what a head reads of a token [dim, width], and where it writes it [width, dim]


@torch.no_grad()
def initialise(network: RetroNetwork, seed: int) -> None:
    """Fill in the first weights (see the module's docstring), the same for the same seed."""
    config, g = network.config, torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if weight.ndim == 2:
            last = name.endswith(("out.weight", "down.weight"))
            shrink = 0.5 / math.sqrt(2 * config.layers) if last else 1.0
            weight.normal_(0, shrink * 0.7 / math.sqrt(weight.shape[1]), generator=g)
    network.embed.weight.normal_(0, SCALE, generator=g)
    # One axis is the same for all tokens: the positional heads find their fixed vector there.
    network.embed.weight[:, 0] = 0.5 * SCALE * math.sqrt(config.hidden)
    reduce = _projection(config.encoder_hidden, config.hidden, g)
    reduce[:, 0] = 0
    reduce[0] = 0
    reduce[0, 0] = 1
    network.encoder.reduce.weight.copy_(reduce)
    first, entry = network.blocks()[0], network.encoder.layers[0]
    assert isinstance(entry, NeighbourLayer)
    back = _look_back(config, first.attention, [None] * LOOKS_BACK, g)
    # The encoder's heads read of a token what the decoder's read of it, one token further back.
    reads = [_projection(config.dim, config.encoder_hidden, g), *(r @ reduce.T for r, _ in back)]
    reads[0][:, 0] = 0
    seen = _look_back(config, entry.attention, reads[:LOOKS_BACK], g)
    for layer in network.blocks():
        if layer.cross is not None:
            _follow(config, layer.cross, reduce, back, seen, g)


def _projection(rows: int, columns: int, g: torch.Generator) -> Tensor:
    out: Tensor = torch.linalg.qr(torch.randn(columns, rows, generator=g))[0].T
    return out.contiguous()


def _look_back(
    config: RetroConfig,
    attention: SelfAttention,
    reads: Sequence[Tensor | None],
    g: torch.Generator,
) -> list[Read]:
    """Have head i look i + 1 tokens back; return what each reads and where it writes it."""
    width, dim = attention.qkv.weight.shape[1], config.dim
    half = dim // 2
    speed = config.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    q, k, v = (attention.qkv.weight[i * width : (i + 1) * width] for i in range(3))
    found: list[Read] = []
    for head, given in enumerate(reads):
        rows = slice(head * dim, (head + 1) * dim)
        q[rows] *= 0.1
        k[rows] *= 0.1
        for i in range(3):
            angle = speed[i] * (1 + head)
            q[head * dim + i, 0] = 1.1
            k[head * dim + i, 0] = 1.1 * math.cos(angle)
            k[head * dim + i + half, 0] = 1.1 * math.sin(angle)
        read = _projection(dim, width, g) if given is None else given
        read[:, 0] = 0
        write = _projection(dim, width, g).T
        v[rows] = read
        attention.out.weight[:, rows] = 0.05 * write
        found.append((read, write))
    return found


def _follow(
    config: RetroConfig,
    cross: CrossAttention,
    reduce: Tensor,
    back: list[Read],
    seen: list[Read],
    g: torch.Generator,
) -> None:
    """Have three heads attend to what followed the same one, two and three tokens in a neighbour."""
    dim, half = config.dim, config.dim // 2
    content = [i for i in range(dim) if i % half >= POSITIONAL]
    k, v = cross.kv.weight[: config.hidden], cross.kv.weight[config.hidden :]
    q = cross.query.weight
    asked = [seen[0][0] @ reduce, *(write.T for _, write in back)]
    for head in range(LOOKS_BACK):
        rows = slice(head * dim, (head + 1) * dim)
        q[rows] *= 0.1
        k[rows] *= 0.1
        share = len(content) // (head + 1)
        for part in range(head + 1):
            places = [head * dim + i for i in content[part * share : (part + 1) * share]]
            q[places] = 1.4 * asked[part][:share]
            k[places] = 1.4 * seen[part][1].T[:share]
        look = _projection(dim, config.encoder_hidden, g)
        look[:, 0] = 0
        v[rows] = look
        cross.out.weight[:, rows] = 0.1 * (look @ reduce).T
