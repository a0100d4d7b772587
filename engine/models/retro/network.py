"""The network: a decoder with chunked cross-attention to an encoder of retrieved neighbours (PipeRAG, section 5.2).

Tokens are generated in intervals. The neighbours retrieved for an interval are visible to the positions that predict
its tokens, and to no earlier one: position p predicts token p + 1, so retrieval r, made before token P, serves the
positions P - 1 to P + interval - 2. Encoded neighbours depend on their own tokens only, not on the query: so they can
be encoded ahead, and kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor, nn

PAD = 0  # fills a neighbour up where its document ends; never attended to


@dataclass(frozen=True, slots=True)
class RetroConfig:
    """The shape of a network; `cross` names the decoder's layers that attend to neighbours."""

    vocabulary: int = 1536
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    ffn: int = 512
    encoder_hidden: int = 128
    encoder_layers: int = 2
    encoder_ffn: int = 256
    cross: tuple[int, ...] = (1, 3)
    chunk: int = 64  # tokens of a chunk; a neighbour has two: the chunk and what follows it
    neighbours: int = 2
    window: int = 512  # how many tokens back a token attends to, itself included
    theta: float = 1e8  # most dimensions hardly turn within the window: they match content
    eps: float = 1e-5

    @property
    def dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def value(self) -> int:
        """Tokens of one neighbour."""
        return 2 * self.chunk


Turn = tuple[Tensor, Tensor]  # cosines and sines, [tokens, dim]


def rotations(positions: Tensor, dim: int, theta: float) -> Turn:
    """Return cosines and sines of `positions` [tokens], each [tokens, dim]."""
    half = dim // 2
    speed = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions.float()[:, None] * speed
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Return `x` [..., tokens, dim] turned by its positions."""
    cos, sin = turn
    left, right = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], -1) * sin.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Return attention of `q` to `k` and `v` [n, heads, tokens, dim], where `seen`; None: to the earlier tokens.

    While gradients are kept, it is computed by its parts: in bfloat16 on a CPU their backward pass takes a third of the
    fused one's time.
    """
    if not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
    if seen is None:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    scores = scores + torch.zeros_like(seen, dtype=scores.dtype).masked_fill(~seen, -math.inf)
    out: Tensor = scores.softmax(-1).to(v.dtype) @ v
    return out


class GatedFeedForward(nn.Module):
    """SwiGLU, after a norm."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the residual stream."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class SelfAttention(nn.Module):
    """Attention among the tokens of one sequence, after a norm."""

    def __init__(self, width: int, dim: int, eps: float) -> None:
        super().__init__()
        self.dim = dim
        self.norm = nn.RMSNorm(width, eps)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def project(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [batch, heads, tokens, dim]; queries and keys are turned."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, width // self.dim, self.dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return rotate(q, turn), rotate(k, turn), v

    def join(self, heads: Tensor) -> Tensor:
        """Return what is added to the residual stream, from the heads' results."""
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


class CrossAttention(nn.Module):
    """Attention of an interval's positions to the encoded neighbours of its retrieval, after a norm.

    A key and a value of zeros stand beside the neighbours', so that attention can find nothing; without
    neighbours the result is zero.
    """

    def __init__(self, config: RetroConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.kv = nn.Linear(config.encoder_hidden, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def project(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, heads, 1 + tokens, dim] of `encoded` [n, tokens, encoder_hidden]."""
        config = self.config
        n, tokens, _ = encoded.shape
        kv = self.kv(encoded).view(n, tokens, 2, config.heads, config.dim).permute(2, 0, 3, 1, 4)
        places = torch.arange(config.value) - config.chunk
        k = rotate(
            kv[0], rotations(places.repeat(tokens // config.value), config.dim, config.theta)
        )
        return F.pad(k, (0, 0, 1, 0)), F.pad(kv[1], (0, 0, 1, 0))

    def forward(self, x: Tensor, turn: Turn, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Return what is added to `x` [n, tokens, hidden]; `seen` [n, 1 + keys] says which keys count."""
        n, tokens, _ = x.shape
        q = self.query(self.norm(x)).view(n, tokens, self.config.heads, self.config.dim)
        q = rotate(q.transpose(1, 2), turn)
        heads = attend(q, k, v, seen[:, None, None])
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


class NeighbourLayer(nn.Module):
    """A layer of the neighbours' encoder: attention in both directions, feed-forward."""

    def __init__(self, config: RetroConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config.encoder_hidden, config.dim, config.eps)
        self.feed = GatedFeedForward(config.encoder_hidden, config.encoder_ffn, config.eps)

    def forward(self, x: Tensor, turn: Turn, seen: Tensor) -> Tensor:
        """Return the residual stream after this layer; `seen` [n, tokens] says which keys count."""
        q, k, v = self.attention.project(x, turn)
        heads = attend(q, k, v, seen[:, None, None])
        x = x + self.attention.join(heads)
        out: Tensor = x + self.feed(x)
        return out


class NeighbourEncoder(nn.Module):
    """Encodes retrieved neighbours, each by itself; token embeddings are the decoder's, projected."""

    def __init__(self, config: RetroConfig) -> None:
        super().__init__()
        self.config = config
        self.reduce = nn.Linear(config.hidden, config.encoder_hidden, bias=False)
        self.layers = nn.ModuleList(NeighbourLayer(config) for _ in range(config.encoder_layers))
        self.norm = nn.RMSNorm(config.encoder_hidden, config.eps)

    def forward(self, embedded: Tensor, seen: Tensor) -> Tensor:
        """Return [n, tokens, encoder_hidden] of embedded tokens [n, tokens, hidden]."""
        x = self.reduce(embedded).to(embedded.dtype)
        turn = rotations(torch.arange(x.shape[1]), self.config.dim, self.config.theta)
        for layer in self.layers:
            x = layer(x, turn, seen)
        out: Tensor = self.norm(x)
        return out


class RetroLayer(nn.Module):
    """A layer of the decoder: attention, cross-attention where `cross` says so, feed-forward."""

    def __init__(self, config: RetroConfig, *, cross: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(config.hidden, config.dim, config.eps)
        self.cross = CrossAttention(config) if cross else None
        self.feed = GatedFeedForward(config.hidden, config.ffn, config.eps)


@dataclass(frozen=True, slots=True)
class EncodedNeighbours:
    """Keys and values of one retrieval (or several, by the first dimension), for each layer that attends to them.

    `seen` [n, 1 + k * value] says which keys count.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    seen: Tensor


class RetroNetwork(nn.Module):
    """The whole model; embeddings are tied."""

    def __init__(self, config: RetroConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        self.encoder = NeighbourEncoder(config)
        self.layers = nn.ModuleList(
            RetroLayer(config, cross=index in config.cross) for index in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden, config.eps)

    def blocks(self) -> list[RetroLayer]:
        """Return the decoder's layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, RetroLayer)]

    def encode(self, neighbours: Tensor) -> EncodedNeighbours:
        """Encode token ids [n, k, value] of n retrievals' neighbours; PAD fills what a document lacks."""
        n, k, tokens = neighbours.shape
        flat = neighbours.reshape(n * k, tokens)
        seen = flat != PAD
        # Attention needs a key: a neighbour of padding alone attends to its first token, and nobody attends to it.
        keys = seen.clone()
        keys[:, 0] = True
        encoded = self.encoder(self.embed(flat), keys).view(n, k * tokens, -1)
        pairs = [layer.cross.project(encoded) for layer in self.blocks() if layer.cross]
        return EncodedNeighbours(
            tuple(k for k, _ in pairs),
            tuple(v for _, v in pairs),
            F.pad(seen.view(n, k * tokens), (1, 0), value=True),
        )

    def logits(self, x: Tensor) -> Tensor:
        """Return logits of the residual stream's last state."""
        return F.linear(self.norm(x), self.embed.weight)

    def forward(self, ids: Tensor, neighbours: Tensor, first: int, interval: int) -> Tensor:
        """Return logits [batch, tokens, vocabulary] of `ids` [batch, tokens], all positions at once.

        `neighbours` [batch, retrievals, k, value]: retrieval r was made before token `first + r * interval`, and the
        last one serves all later positions that an interval holds; `first` is at least 1. Without a retrieval (or with
        PAD alone for neighbours) the network is a plain decoder.
        """
        batch, tokens = ids.shape
        retrievals = neighbours.shape[1]
        x = self.embed(ids)
        turn = rotations(torch.arange(tokens), self.config.dim, self.config.theta)
        encoded = self.encode(neighbours.flatten(0, 1)) if retrievals else None
        offsets = rotations(torch.arange(interval) - 1, self.config.dim, self.config.theta)
        begin, end = first - 1, first - 1 + retrievals * interval
        crossed = 0
        for layer in self.blocks():
            x = x + self._attend(layer.attention, x, turn)
            if layer.cross is not None and encoded is not None:
                k, v = encoded.keys[crossed], encoded.values[crossed]
                crossed += 1
                part = F.pad(x[:, begin:end], (0, 0, 0, max(0, end - tokens)))
                part = part.reshape(batch * retrievals, interval, -1)
                added = layer.cross(part, offsets, k, v, encoded.seen)
                added = added.view(batch, retrievals * interval, -1)[:, : tokens - begin]
                x = x + F.pad(added, (0, 0, begin, max(0, tokens - end)))
            x = x + layer.feed(x)
        return self.logits(x)

    def _attend(self, attention: SelfAttention, x: Tensor, turn: Turn) -> Tensor:
        q, k, v = attention.project(x, turn)
        tokens = x.shape[1]
        if tokens <= self.config.window:
            return attention.join(attend(q, k, v, None))
        back = torch.arange(tokens)[:, None] - torch.arange(tokens)
        near = (back >= 0) & (back < self.config.window)
        return attention.join(attend(q, k, v, near))


def parameters_of(network: nn.Module) -> int:
    """Return how many weights there are."""
    return sum(p.numel() for p in network.parameters())
