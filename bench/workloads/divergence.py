"""What rounded weights cost the shipped model on text it never saw, in our formats and in llama.cpp's.

The text is of its held-out questions with their answers; the reference are its weights in bf16, computed in fp32.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.document import BenchOptions
from bench.rivals import gguf_file, llama_cpp_engine
from bench.rivals.engine_process import LLAMA, EngineProcess, llama_argv, python
from loadgen import stats

TEXTS = 64
Rows = np.ndarray[Any, Any]


class Divergence(msgspec.Struct):
    """The mean KL divergence of each text's tokens from the reference, in nats: ours, and llama.cpp's."""

    ours: list[float]
    theirs: list[float] = []

    @property
    def no_worse(self) -> bool:
        """True unless ours is larger, text by text: the interval of their ratio lies below 1."""
        return not self.theirs or self.ratio()["high"] >= 1.0

    def told(self) -> str:
        """Return both means, as tables show them."""
        means = (f"{np.mean(side):.1e}" if side else "-" for side in (self.ours, self.theirs))
        return " / ".join(means)

    def ratio(self) -> dict[str, float]:
        """Return how many times ours theirs is, text by text, with its interval."""
        return stats.paired_ratio(self.theirs, self.ours)


def judged(word: str, found: Divergence | None) -> str:
    """Return the level that a cell reached; "missed" if the rounding of its weights costs more than the rival's."""
    return word if found is None or found.no_worse else "missed"


def held_out(count: int) -> list[list[int]]:
    """Return the tokens of held-out questions, each with its passages before and its answer after."""
    from models.demo.tokens import Encoder  # noqa: PLC0415 - only where the shipped model is measured
    from models.demo.world.conversations import Message  # noqa: PLC0415
    from models.demo.world.tasks import present  # noqa: PLC0415

    encoder = Encoder.load()
    tasks = map(present, range(count))
    talks = ([*task.prompt, Message("assistant", task.expected)] for task in tasks)
    return [encoder.conversation(talk)[0] for talk in talks]


def by_text(reference: Rows, logits: Rows, texts: Sequence[Sequence[int]]) -> list[float]:
    """Return the mean KL divergence of each text's rows (tokens, vocabulary) from the reference, in nats."""
    exact, other = (_log_softmax(rows.astype(np.float64)) for rows in (reference, logits))
    each = (np.exp(exact) * (exact - other)).sum(1)
    ends = np.cumsum([len(text) for text in texts])
    return [float(part.mean()) for part in np.split(each, ends[:-1])]


def _log_softmax(rows: Rows) -> Rows:
    shifted: Rows = rows - rows.max(1, keepdims=True)
    found: Rows = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found


def in_bf16(options: BenchOptions) -> Path:
    """Return the shipped model with its weights rounded to bf16, which every format then rounds further."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    from models.demo.tokens import DIRECTORY  # noqa: PLC0415

    target = options.setup_dir / "models" / "spillway-s-bf16"
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        weights = load_file(DIRECTORY / "model.safetensors")
        half = {name: values.to(torch.bfloat16) for name, values in weights.items()}
        save_file(half, target / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(DIRECTORY / "tokenizer.json", target)
        config = json.loads((DIRECTORY / "config.json").read_text())
        config.pop("spillway", None)
        (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return target


def our_logits(directory: Path, kind: str, texts: Sequence[Sequence[int]]) -> Rows:
    """Return our engine's fp32 logits (tokens of all texts, vocabulary)."""
    from common.pages.identity import PAGE  # noqa: PLC0415
    from engine.decoder.executor.interface import SequenceInput  # noqa: PLC0415
    from engine.decoder.executor.torch_executor import TorchExecutor  # noqa: PLC0415

    runner = TorchExecutor.load(str(directory), device="cpu", dtype=kind, kv_bytes=1 << 28)
    found = []
    for text in texts:
        table = [list(range(len(text) // PAGE + 1))]
        rows = SequenceInput(list(text), list(range(len(text))), table)
        found.append(runner.logits([rows]).numpy())
    return np.concatenate(found)


async def _their_logits(
    directory: Path, kind: str, texts: Sequence[Sequence[int]], options: BenchOptions
) -> Rows | None:
    """Return llama.cpp's fp32 logits, or None if it is not set up."""
    found = python(LLAMA, options)
    if found is None:
        return None
    file = await asyncio.to_thread(gguf_file.of, directory, kind, found)
    longest = max(map(len, texts))
    setting = {**llama_cpp_engine.BASE, "outputs": longest}
    argv = llama_argv(found, file, setting, 1, longest)
    with tempfile.TemporaryDirectory(prefix="spillway-kl-") as folder:
        target = Path(folder) / "logits.npy"
        async with EngineProcess(argv) as engine:
            await engine.ask("logits", texts=[list(text) for text in texts], file=str(target))
        logits: Rows = np.load(target)
        return logits


async def measure(
    texts: Sequence[Sequence[int]], kinds: Sequence[str], options: BenchOptions
) -> dict[str, Divergence]:
    """Return what each kind of weights costs the shipped model on these texts.

    A kind stands beside llama.cpp's format of as many bits, or beside the one that it names: "int4/Q4_K". A kind that
    is a type of ggml's means one GGUF file of that type, which both sides read; without llama.cpp there is none.
    """
    directory, theirs = in_bf16(options), python(LLAMA, options)
    exact = our_logits(directory, "fp32", texts)
    found = {}
    for kind in kinds:
        here, _, there = kind.partition("/")
        source, dtype = directory, here
        if here in gguf_file.TYPES:
            if theirs is None:
                continue
            source, dtype = await asyncio.to_thread(gguf_file.of, directory, here, theirs), "auto"
        ours = by_text(exact, our_logits(source, dtype, texts), texts)
        rows = await _their_logits(directory, there or here, texts, options)
        found[kind] = Divergence(ours, [] if rows is None else by_text(exact, rows, texts))
    return found
