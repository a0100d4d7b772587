"""X1: every family's logits and greedy text against transformers, on random models, in any batch and chunking.

`python -m bench.engine.exactness --json docs/benchmarks/X1.json`
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engine import random_models
from bench.engine.stepping import Line, Scatter
from common.pages.identity import short_context
from common.types.generation import SamplingParams
from engine.decoder.executor.interface import SamplingRequest
from engine.decoder.executor.torch_executor import TorchExecutor

FAMILIES = random_models.FAMILIES
TOLERANCE = 1e-4  # of fp32 logits, relative to the row's largest
GAP = 1e-3  # a first difference is excused where the oracle's two likeliest logits are nearer than this
EXCUSED = 0.001  # in so many sequences at most
PER_MODEL = 10  # sequences of one random model, all in one mixed batch
NEW = 32
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Row:
    """One family's figures: worst relative differences of logits, and sequences whose greedy text differs.

    `logits_whole` is a prompt at once, `logits_mixed` the same rows in random chunks and company, both against
    transformers; `own` is how far transformers itself is from its own result in fp64, and `beyond` counts sequences
    off by more than the tolerance and twice that. `excused` sequences differ first where the oracle itself is
    undecided, `different` ones elsewhere.
    """

    family: str
    models: int = 0
    sequences: int = 0
    tokens: int = 0
    logits_whole: float = 0.0
    logits_mixed: float = 0.0
    own: float = 0.0
    beyond: int = 0
    excused: int = 0
    different: int = 0
    smallest_gap: float = float("inf")

    @property
    def met(self) -> bool:
        """True if the goals (b) and (c) hold."""
        return not self.beyond and not self.different and self.excused <= EXCUSED * self.sequences


def generate(
    runner: TorchExecutor,
    prompts: Sequence[list[int]],
    new: int,
    sampling: SamplingParams,
    *,
    seed: int,
    first: int = 0,
) -> list[list[int]]:
    """Generate `new` tokens of every prompt, in batches that mix random chunks of prefill with decode.

    The prompts share steps as chance (`seed`) has it; pages are scattered, and given back as they leave a window.
    `first` is the first prompt's choice, with which its random numbers are keyed.
    """
    draw = random.Random(seed)
    scatter = Scatter(runner, draw)
    lines = [Line(scatter, prompt) for prompt in prompts]
    while running := [n for n, line in enumerate(lines) if _more(line, prompts[n], new)]:
        chosen = draw.sample(running, draw.randrange(1, len(running) + 1))
        batch = []
        for n in chosen:
            line, start = lines[n], len(prompts[n])
            count = min(draw.choice((1, 7, 32, 200)), len(line.tokens) - line.computed)
            done = line.computed + count == len(line.tokens)
            output = line.tokens[start:]
            sample = (
                SamplingRequest(sampling, first + n, len(line.tokens), prompts[n], output)
                if done
                else None
            )
            batch.append(line.next_rows(count, sample))
        for n, drawn in zip(chosen, runner.execute(batch), strict=True):
            if drawn is not None:
                lines[n].append(drawn.token)
            lines[n].leave_windows(runner.shape.windows)
    return [line.tokens[len(prompt) :] for line, prompt in zip(lines, prompts, strict=True)]


def _more(line: Line, prompt: list[int], new: int) -> bool:
    return len(line.tokens) < len(prompt) + new


def measure(family: str, *, sequences: int, seed: int, device: str = "cpu") -> Row:
    """Compare so many sequences of random models of one family; every model has another configuration.

    Engine and oracle both compute on `device`.
    """
    row = Row(family)
    while row.sequences < sequences:
        draw = random.Random(f"{family} {seed} {row.models}")
        settings = random_models.settings(family, draw.randrange(1 << 30))
        with tempfile.TemporaryDirectory() as directory:
            model = random_models.write(Path(directory), family, settings, seed=row.models)
            model = model.to(device)
            runner = TorchExecutor.load(
                directory, device=device, dtype="fp32", threads=1, kv_bytes=16 << 20
            )
        count = min(PER_MODEL, sequences - row.sequences)
        prompts = [
            [draw.randrange(random_models.VOCABULARY) for _ in range(draw.randrange(1, 160))]
            for _ in range(count)
        ]
        outputs = generate(runner, prompts, NEW, _GREEDY, seed=draw.randrange(1 << 30))
        texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
        oracles = [random_models.oracle(model, text) for text in texts]
        short = short_context(runner.fingerprint)
        judges = [
            _judge(model, text, oracle, short) for text, oracle in zip(texts, oracles, strict=True)
        ]
        whole = [logits_alone(runner, text, draw) for text in texts]
        mixed = _mixed(runner, texts, draw)
        precise = model.double()
        owns = [
            relative(o, random_models.oracle(precise, t))
            for o, t in zip(oracles, texts, strict=True)
        ]
        for prompt, output, oracle, judge, alone, among, own in zip(
            prompts, outputs, oracles, judges, whole, mixed, owns, strict=True
        ):
            off = relative(alone, oracle), relative(among, oracle)
            row.logits_whole, row.logits_mixed = (
                max(row.logits_whole, off[0]),
                max(row.logits_mixed, off[1]),
            )
            row.own = max(row.own, own)
            # Some random models turn any rounding into more than the tolerance, transformers' own as well.
            row.beyond += max(off) > max(TOLERANCE, 2 * own)
            _compare_text(row, output, judge[len(prompt) - 1 : -1])
            row.tokens += len(prompt) + len(output)
        row.models += 1
        row.sequences += count
    return row


def _judge(model: Any, text: list[int], whole: torch.Tensor, short: int) -> torch.Tensor:
    """Return the logits by which each token was to be chosen: those of a text no longer than `short` until there."""
    if not 0 < short < len(text):
        return whole
    return torch.cat([random_models.oracle(model, text[:short]), whole[short:]])


def _compare_text(row: Row, output: list[int], oracle: torch.Tensor) -> None:
    """Count a text whose first difference from the oracle's greedy one is excused, or not."""
    best = oracle.topk(2, dim=-1)
    gaps = best.values[:, 0] - best.values[:, 1]
    row.smallest_gap = min(row.smallest_gap, float(gaps.min()))
    differs = (best.indices[:, 0] != torch.tensor(output)).nonzero()
    if len(differs):
        if gaps[differs[0, 0]] < GAP:
            row.excused += 1
        else:
            row.different += 1


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the worst row's largest difference over its largest logit."""
    worst = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    return float(worst.max())


def logits_alone(runner: TorchExecutor, text: list[int], draw: random.Random) -> torch.Tensor:
    """Return the logits of one text, computed at once and alone, on the host."""
    return runner.logits([Line(Scatter(runner, draw), text).next_rows(len(text))]).cpu()


def _mixed(
    runner: TorchExecutor, texts: list[list[int]], draw: random.Random
) -> list[torch.Tensor]:
    """Return each text's logits, computed in random chunks and company."""
    scatter = Scatter(runner, draw)
    lines = [Line(scatter, text) for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in lines]
    while running := [n for n, line in enumerate(lines) if line.computed < len(line.tokens)]:
        chosen = draw.sample(running, draw.randrange(1, len(running) + 1))
        batch = [lines[n].next_rows(draw.choice((1, 1, 7, 32, 200))) for n in chosen]
        logits, end = runner.logits(batch).cpu(), 0
        for n, rows in zip(chosen, batch, strict=True):
            start, end = end, end + len(rows.tokens)
            found[n].append(logits[start:end])
            lines[n].leave_windows(runner.shape.windows)
    return [torch.cat(each) for each in found]


def main(argv: list[str] | None = None) -> int:
    """Run the command: 0 if every family meets the goals, else 1."""
    parser = argparse.ArgumentParser("python -m bench.engine.exactness", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="20 sequences a family")
    parser.add_argument("--count", type=int, help="sequences a family; default 1000")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    from bench import document, suite  # noqa: PLC0415 - the rest needs only the engine
    from bench.cli import show  # noqa: PLC0415

    options = document.BenchOptions(quick=args.quick, seed=args.seed, count=args.count)
    found = suite.run("X1", options)
    if args.json:
        document.save(args.json, found)
    show(found)
    return 0 if set(found["met"].values()) == {"met"} else 1


if __name__ == "__main__":
    sys.exit(main())
