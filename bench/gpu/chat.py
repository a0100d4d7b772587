"""Chat on an accelerator: exactness against transformers, and the engine's speed on random weights made there.

    python -m bench.gpu.chat --device cuda --json chat.json            # on the machine with the accelerator
    python -m bench.gpu.chat --device cpu --tiny --json tiny.json      # a rehearsal

The engine is the gpu_worker's scheduler and runner, without bus and HTTP. Resumable: a cell that is in the JSON is not
measured again, and none is begun after `--minutes`; the status is then 3, and the same command goes on.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine import exactness, random_models
from bench.engine.driver import Driver
from bench.gpu import shapes
from bench.gpu.record import Record, arguments
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.scheduler import StepLimits

STREAMS = (1, 8, 32)
STEP_TOKENS = (512, 4096)  # the worker's default, and what keeps a large device busy
PROMPT, NEW, LONG = 256, 128, 2048
KV_BYTES = 8 << 30  # 8 long prompts of the largest shape, and room
TINY, BIG = "tiny", ("llama-1b", "qwen3-0.6b", "llama-8b")
REPEATS = 3


class Burst:
    """Prompts that arrive at once and are generated together to their full length; moments are seconds from then."""

    def __init__(
        self, runner: TorchExecutor, prompts: Sequence[list[int]], new: int, step_tokens: int
    ) -> None:
        self._driver = Driver(runner, StepLimits(step_tokens, len(prompts)))
        for prompt in prompts:
            self._driver.add(prompt, new)
        self.drawn_s: list[list[float]] = []

    def run(self) -> None:
        """Step until all is generated; RuntimeError if a step fails."""
        began = time.perf_counter()
        self._driver.run()
        self.drawn_s = [[at - began for at in moments] for moments in self._driver.drawn_s.values()]

    @property
    def first_s(self) -> list[float]:
        """Return each stream's time to its first token."""
        return [moments[0] for moments in self.drawn_s]

    @property
    def decode_tokens_per_s(self) -> float:
        """Return the tokens a second while every stream decodes: after the last first token, before the first end."""
        start = max(self.first_s)
        end = min(moments[-1] for moments in self.drawn_s)
        count = sum(start < at <= end for moments in self.drawn_s for at in moments)
        return count / (end - start)


def prompts(runner: TorchExecutor, count: int, length: int, seed: int) -> list[list[int]]:
    """Return random prompts that share no page."""
    draw = random.Random(seed)
    return [[draw.randrange(runner.shape.vocabulary) for _ in range(length)] for _ in range(count)]


def decode(runner: TorchExecutor, streams: int, tiny: bool) -> dict[str, Any]:
    """Measure so many streams side by side: tokens a second, and each stream's time to its first token."""
    length, new = (32, 16) if tiny else (PROMPT, NEW)
    bursts = []
    for turn in range(REPEATS + 1):
        given = prompts(runner, streams, length, seed=streams * 100 + turn)
        bursts.append(Burst(runner, given, new, STEP_TOKENS[0]))
        bursts[-1].run()
    measured = bursts[1:]  # the first one warms
    return {
        "prompt_tokens": length,
        "new_tokens": new,
        "tokens_per_s": [burst.decode_tokens_per_s for burst in measured],
        "first_s": [burst.first_s for burst in measured],
    }


def prefill(runner: TorchExecutor, count: int, step_tokens: int, tiny: bool) -> dict[str, Any]:
    """Measure so many long prompts at once: prompt tokens a second until the last one's first token."""
    length = 128 if tiny else LONG
    speeds = []
    for turn in range(REPEATS + 1):
        burst = Burst(runner, prompts(runner, count, length, seed=turn), 1, step_tokens)
        burst.run()
        speeds.append(count * length / max(burst.first_s))
    return {"prompt_tokens": length, "tokens_per_s": speeds[1:]}


def agreement(runner: TorchExecutor, directory: Path, device: str, tiny: bool) -> dict[str, Any]:
    """Compare the engine's bf16 logits with transformers' in fp32, and transformers' own bf16 with them: rule (d)."""
    import transformers  # noqa: PLC0415 - slow to import

    texts = prompts(runner, 2, 32 if tiny else 256, seed=5)
    ours = [exactness.logits_alone(runner, text, random.Random(1)) for text in texts]
    theirs: dict[str, list[torch.Tensor]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        theirs[name] = [random_models.oracle(model.to(device).eval(), text) for text in texts]
        del model
    found: dict[str, Any] = {}
    for name, logits in (("engine", ours), ("transformers", theirs["bf16"])):
        pairs = list(zip(logits, theirs["fp32"], strict=True))
        same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
        found[f"{name}_same_best"] = same / sum(len(text) for text in texts)
        found[f"{name}_worst"] = max(exactness.relative(a, b) for a, b in pairs)
    return found


def measure_exactness(record: Record, device: str, tiny: bool) -> None:
    """Compare random small models of every family with transformers in fp32 on this device: rules (b) and (c)."""
    sequences, parts = (10, 1) if tiny else (200, 5)

    def compare(family: str, part: int) -> dict[str, Any]:
        row = exactness.measure(family, sequences=sequences, seed=100 + part, device=device)
        return asdict(row) | {"met": row.met}

    for family in exactness.FAMILIES:
        for part in range(parts):
            record.fill(f"exact/{family}/{part}", partial(compare, family, part))


def measure_speed(record: Record, directory: Path, shape: str, device: str, tiny: bool) -> None:
    """Fill in the speed cells of one shape that are not there yet."""
    decodes = {f"decode/{shape}/{streams}": streams for streams in STREAMS}
    prefills = {
        f"prefill/{shape}/{count}/{tokens}": (count, tokens)
        for count in (1, 8)
        for tokens in STEP_TOKENS
    }
    compared = f"agreement/{shape}"
    if not record.wants(*decodes, *prefills, compared):
        return
    shapes.write(directory, shapes.SHAPES[shape], device)
    room = KV_BYTES // 64 if tiny else KV_BYTES
    runner = TorchExecutor.load(str(directory), device=device, dtype="bf16", kv_bytes=room)
    for name, streams in decodes.items():
        record.fill(name, partial(decode, runner, streams, tiny))
    for name, (count, tokens) in prefills.items():
        record.fill(name, partial(prefill, runner, count, tokens, tiny))
    record.fill(compared, partial(agreement, runner, directory, device, tiny))


def show(cells: dict[str, Any]) -> None:
    """Print a line a cell."""
    for name, cell in cells.items():
        if name.startswith("exact/"):
            told = "logits {logits_whole:.1e}, mixed {logits_mixed:.1e}; {sequences} texts, {different} differ, "
            print(f"{name:28} " + (told + "{excused} excused").format(**cell))
        elif name.startswith("agreement/"):
            print(f"{name:28} " + ", ".join(f"{key} {cell[key]:.4g}" for key in cell))
        else:
            speed = sorted(cell["tokens_per_s"])[len(cell["tokens_per_s"]) // 2]
            first = [max(each) for each in cell.get("first_s", [])]
            told = f"   last first token after {min(first) * 1e3:.1f} ms" if first else ""
            print(f"{name:28} {speed:12.1f} tokens/s{told}")


def main(argv: list[str] | None = None) -> int:
    """Measure what is not measured yet: 0 done and exact, 1 not exact, 3 cells are left for another run."""
    args = arguments(__doc__, argv, models="27 GB")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    record = Record(args.json, args.device, args.minutes)
    measure_exactness(record, args.device, args.tiny)
    with tempfile.TemporaryDirectory() as folder:
        for shape in (TINY,) if args.tiny else BIG:
            where = (args.models or Path(folder)) / shape
            measure_speed(record, where, shape, args.device, args.tiny)
    show(record.cells)
    return record.status()


if __name__ == "__main__":
    sys.exit(main())
