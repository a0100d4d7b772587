"""Logits of GGUF files of every architecture beside llama.cpp's own, where its library is set up."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.document import BenchOptions
from bench.engine import random_models
from bench.engine.stepping import Line, Scatter
from bench.rivals import llama_cpp_engine
from bench.rivals.engine_process import LLAMA, EngineProcess, llama_argv, python
from engine.decoder.executor.torch_executor import TorchExecutor
from tests.support import gguf_files

LENGTH = 90


CASES = [(family, "F32") for family in gguf_files.ARCHITECTURES]
CASES += [("llama", kind) for kind in ("Q8_0", "Q4_K", "Q5_K", "Q5_1", "IQ4_XS")]


@pytest.mark.parametrize(("family", "kind"), CASES)
async def test_logits_are_llama_cpps(tmp_path: Path, family: str, kind: str) -> None:
    """The same file is the same model to both; llama.cpp keeps keys and values in fp16, and rounds inputs."""
    found = python(LLAMA, BenchOptions())
    if found is None:
        pytest.skip("no rival: `spillway bench L1 --setup` installs llama.cpp")
    chosen = gguf_files.settings(family, 1)
    chosen |= {name: 30.0 for name, value in chosen.items() if "softcapping" in name and not value}
    if family in {"phi3", "mistral"}:
        chosen["sliding_window"] = None  # which llama.cpp does not read for them
    if "original_max_position_embeddings" in chosen:
        # llama.cpp takes the long factors by the room for a text, 256 tokens at least, ours by the text's length.
        chosen["original_max_position_embeddings"] = 400
    random_models.write(tmp_path, family, chosen)
    file = gguf_files.write(tmp_path, tmp_path / "model.gguf", lambda _: kind)
    draw = random.Random(1)
    tokens = [draw.randrange(random_models.VOCABULARY) for _ in range(LENGTH)]

    ours = _logits(file, "fp32", tokens)
    setting = {**llama_cpp_engine.BASE, "outputs": LENGTH}
    async with EngineProcess(llama_argv(found, file, setting, 1, LENGTH)) as engine:
        await engine.ask("logits", texts=[tokens], file=str(tmp_path / "logits.npy"))
    theirs = torch.from_numpy(np.load(tmp_path / "logits.npy"))

    off = float((ours - theirs).norm() / theirs.norm())
    print(f"{family} {kind}: {off:.1e} apart, rms relative")
    assert off <= max(1e-2, 3 * float((_logits(file, "auto", tokens) - ours).norm() / ours.norm()))


def _logits(file: Path, dtype: str, tokens: list[int]) -> torch.Tensor:
    """Return our logits (tokens, vocabulary); "auto" rounds inputs of quantised matrices."""
    runner = TorchExecutor.load(str(file), device="cpu", dtype=dtype, threads=1, kv_bytes=8 << 20)
    return runner.logits([Line(Scatter(runner, random.Random(1)), tokens).next_rows(len(tokens))])
