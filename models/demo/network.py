"""The network: a plain Llama, small and fast to train on one core, and how it starts.

The first weights are random, but not independent: some heads of the first layer look one to three
tokens back, and in later layers some queries and keys share one random projection, so that equal
content attends to equal content from the start. That brings recall by name forward; nothing about
the world is in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - what every torch user calls it
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of the network."""

    vocabulary: int = 1536
    hidden: int = 256
    layers: int = 5
    heads: int = 8
    ffn: int = 512
    context: int = 4096
    theta: float = 1e8  # most dimensions hardly turn within the context: they match content
    eps: float = 1e-5

    @property
    def dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


POSITIONAL: Final = 6  # the fastest rotations of each head; the others serve content


def rotations(size: Size, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for `positions` [batch, tokens], shaped for the heads."""
    half = size.dim // 2
    speed = size.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * speed
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Layer(nn.Module):
    """Attention and feed-forward, each before a residual sum."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        wide = size.hidden
        self.qkv = nn.Linear(wide, 3 * wide, bias=False)
        self.out = nn.Linear(wide, wide, bias=False)
        self.gate_up = nn.Linear(wide, 2 * size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, wide, bias=False)
        self.norm1 = nn.RMSNorm(wide, size.eps)
        self.norm2 = nn.RMSNorm(wide, size.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        batch, tokens, wide = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.size.heads, self.size.dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            _turn(q, cos, sin), _turn(k, cos, sin), v, is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, wide))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class Network(nn.Module):
    """The whole model; embeddings are tied."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, size.eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, rows: Tensor | None) -> Tensor:
        """Return logits, of the flat positions `rows` only if given."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = x.flatten(0, 1)
        if rows is not None:
            x = x[rows]
        logits: Tensor = F.linear(self.norm(x), self.embed.weight)
        return logits


def _random_projection(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    out: Tensor = torch.linalg.qr(torch.randn(columns, rows, generator=generator))[0].T
    return out


@torch.no_grad()
def initialise(net: Network, seed: int) -> None:
    """Fill in the first weights (see the module's docstring), the same for the same seed."""
    size, g = net.size, torch.Generator().manual_seed(seed)
    wide, dim, half = size.hidden, size.dim, size.dim // 2
    scale = 0.03
    net.embed.weight.normal_(0, scale, generator=g)
    # One axis is the same for all tokens: the positional heads find their fixed vector there.
    net.embed.weight[:, 0] = 0.5 * scale * math.sqrt(wide)
    speed = size.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    content = torch.tensor([i for i in range(dim) if i % half >= POSITIONAL])
    back: list[tuple[Tensor, Tensor]] = []
    for index, layer in enumerate(net.layers):
        assert isinstance(layer, Layer)
        for name, weight in layer.named_parameters():
            if weight.ndim == 2:
                shrink = 0.5 / math.sqrt(2 * size.layers) if name[:4] in {"out.", "down"} else 1
                weight.normal_(0, shrink * 0.7 / math.sqrt(weight.shape[1]), generator=g)
        q, k, v = (layer.qkv.weight[i * wide : (i + 1) * wide] for i in range(3))
        for head in range(size.heads):
            rows = slice(head * dim, (head + 1) * dim)
            if index <= 1 and head < (3 if index == 0 else 1):  # look back
                distance = 1 + head
                q[rows] *= 0.1
                k[rows] *= 0.1
                for i in range(3):
                    a = 1.1
                    q[head * dim + i, 0] = a
                    k[head * dim + i, 0] = a * math.cos(speed[i] * distance)
                    k[head * dim + i + half, 0] = a * math.sin(speed[i] * distance)
                read = _random_projection(dim, wide, g)
                read[:, 0] = 0
                write = _random_projection(dim, wide, g).T
                v[rows] = read
                layer.out.weight[:, rows] = 0.05 * write
                if index == 0:
                    back.append((read, write))
            elif index >= 1 and head < 3 and head - 1 < len(back):  # what followed the same token
                read, write = back[head - 1]
                q[rows] *= 0.1
                k[rows] *= 0.1
                q[head * dim + content] = 1.4 * read[: len(content)]
                k[head * dim + content] = 1.4 * write.T[: len(content)]
                look = _random_projection(dim, wide, g)
                look[:, 0] = 0
                v[rows] = look
                layer.out.weight[:, rows] = 0.05 * look.T
            elif head < 6:  # equal content
                look = _random_projection(len(content), wide, g)
                look[:, 0] = 0
                q[rows] *= 0.1
                k[rows] *= 0.1
                q[head * dim + content] = 1.2 * look
                k[head * dim + content] = 1.2 * look


def parameters_of(net: Network) -> int:
    """Return how many parameters there are."""
    return sum(p.numel() for p in net.parameters())
