"""`paged_attention` in plain torch: the reference against which every other implementation is tested."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from engine.kernels.attention_plan import AttentionPart, GroupPlan
from engine.kernels.page_memory import PageMemory
from engine.kernels.partial import Partial


def paged_attention(q: Tensor, kv_pages: PageMemory, layer: int, plan: GroupPlan) -> Tensor:
    """Attend with rows (rows, heads, dim) over the pages of one layer, numbered within its group.

    The `plan` holds which rows see which tokens, for any positions, page placement and windows; heads may be grouped.
    K and V of this step's rows must already be written. Returns (rows, heads, dim), in the data type of `q`.
    """
    out = torch.empty_like(q)
    heads, dim = q.shape[1:]
    shared = heads // kv_pages.kv_heads  # query heads that share one head of K and V
    for part in plan.parts:
        keys, values = kv_pages.read(layer, part.blocks, part.sequences)
        rows = _rows(q, part, kv_pages)
        if kv_pages.cap:
            found = _capped(rows, keys, values, part.mask, kv_pages)
        else:
            found = F.scaled_dot_product_attention(
                rows,
                keys.expand(-1, shared, -1, -1),
                values.expand(-1, shared, -1, -1),
                attn_mask=part.mask,
                scale=kv_pages.scale,
            )
        found = found.view(part.sequences, kv_pages.kv_heads, shared, part.length, dim)
        out[part.rows] = found.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
    return out


def partial_attention(q: Tensor, kv_pages: PageMemory, layer: int, plan: GroupPlan) -> Partial:
    """Attend over the resident pages of one layer; return fp32 sums that are to be merged with other pages'."""
    shared = q.shape[1] // kv_pages.kv_heads
    shapes = q.shape, q.shape[:2], q.shape[:2]
    found = Partial(*(torch.empty(*shape, device=q.device) for shape in shapes))
    for part in plan.parts:
        keys, values = kv_pages.read(layer, part.blocks, part.sequences)
        scores = (_rows(q, part, kv_pages) @ keys.transpose(-1, -2)).float() * kv_pages.scale
        if kv_pages.cap:
            scores = kv_pages.cap * torch.tanh(scores / kv_pages.cap)
        scores = scores + part.mask
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        each = (weights @ values.float(), top, weights.sum(-1, keepdim=True))
        for there, some in zip(found, each, strict=True):
            apart = some.view(part.sequences, kv_pages.kv_heads, shared, part.length, -1)
            there[part.rows] = apart.permute(0, 3, 1, 2, 4).reshape(-1, *there.shape[1:])
    return found


def _rows(q: Tensor, part: AttentionPart, kv_pages: PageMemory) -> Tensor:
    """Return a part's queries, (sequences * kv heads, shared heads, length, dim)."""
    heads, dim = q.shape[1:]
    shared = heads // kv_pages.kv_heads
    shape = (part.sequences, part.length, kv_pages.kv_heads, shared, dim)
    return q[part.rows].view(shape).permute(0, 2, 3, 1, 4).reshape(-1, shared, part.length, dim)


def _capped(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kv_pages: PageMemory
) -> Tensor:
    """Attend with soft-capped scores: score x becomes cap * tanh(x / cap) before the mask."""
    scores = rows @ keys.transpose(-1, -2) * (kv_pages.scale / kv_pages.cap)
    scores = kv_pages.cap * torch.tanh(scores) + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(rows.dtype) @ values
