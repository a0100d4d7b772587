"""`paged_attention` in plain torch: the reference against which every other implementation is tested."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from engine.kernels.attention_plan import GroupPlan
from engine.kernels.page_memory import PageMemory


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
        shape = (part.sequences, part.length, kv_pages.kv_heads, shared, dim)
        rows = q[part.rows].view(shape).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(-1, shared, part.length, dim)
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


def _capped(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kv_pages: PageMemory
) -> Tensor:
    """Attend with soft-capped scores: score x becomes cap * tanh(x / cap) before the mask."""
    scores = rows @ keys.transpose(-1, -2) * (kv_pages.scale / kv_pages.cap)
    scores = kv_pages.cap * torch.tanh(scores) + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(rows.dtype) @ values
