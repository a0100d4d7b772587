"""Decode steps from buffers that stay where they are: the rows, keys and values of steps computed as ever."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine import random_models
from common.pages.identity import PAGE, short_context
from engine.decoder.executor.torch_executor import StepRows, TorchExecutor
from engine.kernels.page_memory import PageMemory
from engine.models.decoders.cuda_graphs import GraphedDecoder
from engine.models.decoders.torch_decoder import Attention, RowOperations, TorchDecoder
from tests.support.kernels import triton_kernels

TRITON, ROWS = triton_kernels("triton_attention"), triton_kernels("triton_rows")
CONTEXTS = (514, 3, 40, 31, 32, 64, 511)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "window"),
    [("llama", None), ("mistral", 40), ("gemma2", 40), ("gemma3_text", 40), ("phi3", None)],
)
def test_steps_from_fixed_buffers(tmp_path: Path, family: str, window: int | None) -> None:
    """Batches that grow, shrink and get longer, from buffers captured for other ones (rehearsed without a device).

    Of Phi, texts on both sides of its short context.
    """
    if TRITON is None or ROWS is None:
        pytest.skip("Triton is not installed (make setup-full)")
    chosen: dict[str, Any] = random_models.settings(family, 1)
    chosen |= {"max_position_embeddings": 1024} | ({"sliding_window": window} if window else {})
    if family == "phi3":
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        chosen |= {"original_max_position_embeddings": 100, "rope_parameters": rope}
    random_models.write(tmp_path, family, chosen)
    runner = TorchExecutor.load(
        str(tmp_path), device="cpu", dtype="fp32", threads=1, kv_bytes=24 << 20, compiled=False
    )
    plain = runner._decoder
    assert isinstance(plain, TorchDecoder)
    by_triton = Attention(
        TRITON.plan_blocks,
        TRITON.paged_attention,
        partial(TRITON.plan_blocks, whole=False),
        TRITON.partial_attention,
    )
    plain._attention = by_triton
    plain._operations = RowOperations(ROWS.rms_norm, ROWS.rotate, ROWS.write_pages)
    pools, short = runner._pools, short_context(runner.fingerprint)
    assert short == (100 if family == "phi3" else 0)
    graphed, draw = GraphedDecoder(plain, TRITON.plan_blocks), random.Random(1)
    tables, at = [], 0
    for context in CONTEXTS:
        pages = context // PAGE + 1
        tables.append([list(range(at, at + pages))] * len(pools))
        at += pages

    with torch.inference_mode():
        for pool in pools:
            pool.data.normal_()
        for count in (3, 7, 2, 1, 7):
            chosen_rows = draw.sample(range(len(CONTEXTS)), count)
            queries = [
                StepRows([CONTEXTS[n]], tables[n], 0 < short <= CONTEXTS[n]) for n in chosen_rows
            ]
            tokens = torch.tensor([draw.randrange(random_models.VOCABULARY) for _ in queries])
            before = [pool.data.clone() for pool in pools]
            expected = plain.hidden(tokens, queries, pools)
            written = [pool.data.clone() for pool in pools]
            for pool, data in zip(pools, before, strict=True):
                pool.data.copy_(data)
            assert torch.allclose(graphed.hidden(tokens, queries, pools), expected, atol=1e-3)
            assert _same(written, pools)
        prompt = StepRows([0, 1, 2], tables[1])
        expected = plain.hidden(torch.tensor([1, 2, 3]), [prompt], pools)
        assert torch.equal(graphed.hidden(torch.tensor([1, 2, 3]), [prompt], pools), expected)
    assert {size for size, _ in graphed._steps} == {1, 2, 4, 8}


def _same(written: list[torch.Tensor], pools: list[PageMemory]) -> bool:
    return all(
        torch.allclose(one, pool.data, atol=1e-3) for one, pool in zip(written, pools, strict=True)
    )
