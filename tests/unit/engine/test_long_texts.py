"""Texts that outgrow a model's short context (LongRoPE): the logits and the greedy tokens of transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine import random_models
from bench.engine.stepping import Line, Scatter
from common.cost.step import Step
from common.pages.identity import PAGE, root_id, short_context
from common.types.generation import SamplingParams
from engine.decoder.capacity import DecoderCapacity
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import ChoiceOutput, StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue

SHORT = 70
NEW = 60
TOLERANCE = 1e-4
PROBES = [(Step(1, 1, 1.0), 1e-3), (Step(4, 4, 8.0), 1e-3), (Step(1, 64, 2000.0), 1e-3)]


def odd(case: str) -> tuple[str, dict[str, Any]]:
    """Return the family and the configuration of a model that turns texts beyond SHORT tokens otherwise."""
    family, seed = {
        "phi": ("phi3", 1),
        "phi, part of a head": ("phi3", 2),
        "phi, window": ("phi3", 3),
        "llama": ("llama", 4),
        "some layers": ("gemma3_text", 5),
        "layers that turn nothing": ("smollm3", 6),
    }[case]
    chosen = random_models.settings(family, seed)
    draw = random.Random(seed)
    share = 0.75 if case == "phi, part of a head" else 1.0
    dim = 16 if family == "phi3" else chosen.get("head_dim")
    dim = dim or chosen["hidden_size"] // chosen["num_attention_heads"]
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": SHORT,
        "short_factor": [draw.uniform(1, 1.5) for _ in range(int(dim * share) // 2)],
        "long_factor": [draw.uniform(2, 6) for _ in range(int(dim * share) // 2)],
    }
    if family == "phi3":
        chosen["original_max_position_embeddings"] = SHORT
        chosen["sliding_window"] = 45 if case == "phi, window" else None
        chosen["rope_parameters"] = {**rope, "partial_rotary_factor": share}
    elif family == "gemma3_text":
        chosen["rope_parameters"]["full_attention"] = rope
        chosen |= {"num_hidden_layers": 3, "sliding_window": 40, "sliding_window_pattern": 2}
    else:
        chosen["rope_parameters"] = rope
        chosen |= {"sliding_window": None, "no_rope_layers": [1, 0] * 2, "num_hidden_layers": 4}
    return family, chosen


CASES = ("phi", "phi, part of a head", "phi, window", "llama", "some layers", "layers that turn nothing")  # fmt: skip


def load(directory: Path, *, compiled: bool = True, pages: int = 0) -> TorchExecutor:
    """Load a model with attention on the host beside it, and so many pages on the device, or enough."""
    runner = TorchExecutor.load(
        str(directory), device="cpu", dtype="fp32", threads=1, kv_bytes=8 << 20, compiled=compiled,
        host_bytes=8 << 20, host_threads=1,
    )  # fmt: skip
    assert short_context(runner.fingerprint) == SHORT
    if pages:
        runner.shape = runner.shape._replace(pages=pages, context=pages * PAGE)
    return runner


def text(seed: int, count: int) -> list[int]:
    """Return random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(3, random_models.VOCABULARY) for _ in range(count)]


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_short_and_long_texts(tmp_path: Path, case: str, *, compiled: bool) -> None:
    """Texts up to the short context and beyond, side by side in the same steps, have transformers' logits.

    So they have in a step in stages.
    """
    torch.set_num_threads(1)
    family, chosen = odd(case)
    model = random_models.write(tmp_path, family, chosen)
    runner = load(tmp_path, compiled=compiled)
    try:
        draw = random.Random(case)
        scatter = Scatter(runner, draw)
        texts = [text(n, n) for n in (SHORT - 1, SHORT, SHORT + 1, SHORT + 33, 3 * SHORT)]
        lines = [Line(scatter, tokens) for tokens in texts]
        found: list[list[torch.Tensor]] = [[] for _ in lines]
        while left := [n for n, line in enumerate(lines) if line.computed < len(texts[n])]:
            batch = [lines[n].next_rows(draw.randint(1, 90)) for n in left]
            ends = torch.tensor([len(rows.tokens) for rows in batch]).cumsum(0)[:-1]
            staged = [rows._replace(part=number % 2) for number, rows in enumerate(batch)]
            logits = runner.logits(batch) if draw.random() < 0.7 else runner.staged_logits(staged)
            for n, some in zip(left, torch.tensor_split(logits, ends), strict=True):
                found[n].append(some)
    finally:
        runner.close()

    for tokens, pieces in zip(texts, found, strict=True):
        expected = random_models.oracle(model, tokens)
        off = (torch.cat(pieces) - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert float(off.max()) <= TOLERANCE, f"a text of {len(tokens)} tokens"


class Answers:
    """Runs greedy generations of NEW tokens on engines of one model."""

    def __init__(self, runner: TorchExecutor, device: DeviceQueue) -> None:
        self.runner, self._device = runner, device

    def engine(self) -> DecoderEngine:
        """Return an engine that guesses tokens and draws several a step."""
        capacity = DecoderCapacity(PROBES, slo_s=60.0, context=512, fixed=True)
        limits = StepLimits(64, 8)
        return DecoderEngine(self.runner, capacity, limits, self._device, lookup=True, several=4)

    def begin(self, prompt: Sequence[int], known: Sequence[int] = (), new: int = NEW) -> Generation:
        """Make a generation; `known` are tokens of its answer that were delivered before."""
        request = GenerationRequest(
            f"r{len(prompt)}", [prompt], StopRules(new), root_id(self.runner.fingerprint, ""),
            sampling=SamplingParams(temperature=0.0), short_context=SHORT,
        )  # fmt: skip
        vocabulary = Vocabulary(self.runner.tokenizer_json())
        made = Generation(request, vocabulary, len(prompt))
        if known:
            stream = vocabulary.stream(())
            delivered = "".join(stream.push(token) for token in known)
            made.choices[0].restore([ChoiceOutput(list(known), delivered)])
            made.choices[0].sequence.resume(known)
        return made

    async def end(self, engine: DecoderEngine, made: Sequence[Generation]) -> list[list[int]]:
        """Compute generations with steps submitted ahead, and return the tokens of each."""
        for generation in made:
            engine.add(generation)
        while not engine.idle or engine.running:
            step = engine.running
            if step is None:
                parts = engine.plan()
                engine.scheduler.check(parts or ())
                if parts is None:
                    continue
                step = engine.submit(parts)
            engine.submit_ahead()
            engine.commit(step, await step.handle.result())
        while engine.scheduler.table.tiers.moving:  # noqa: ASYNC110 - saves in progress send no notice
            await asyncio.sleep(0.001)
        assert all(pool.used == 0 for pool in engine.scheduler.table.pools)
        return [list(generation.choices[0].tokens) for generation in made]


def theirs(model: Any, prompt: list[int], *, cached: bool) -> list[int]:
    """Return transformers' greedy answer of NEW tokens."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, use_cache=cached,
            pad_token_id=0, attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        )  # fmt: skip
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("case", CASES)
async def test_greedy_answers_that_outgrow_the_short_context(tmp_path: Path, case: str) -> None:
    """Answers that begin before, at and behind the bound are those of transformers, with few pages and after failovers.

    Phi's own `generate` drops its cache at the bound, as ours does; of other families it keeps keys that were turned
    otherwise, so that its answers depend on whether it has a cache: ours are those without.
    """
    torch.set_num_threads(1)
    family, chosen = odd(case)
    model = random_models.write(tmp_path, family, chosen)
    # `generate` asks for the field by this name only
    assert family != "phi3" or model.config.original_max_position_embeddings == SHORT
    prompts = [text(n, n) for n in (SHORT - 30, SHORT - 1, SHORT, SHORT + 1, SHORT + 40)]
    expected = [theirs(model, prompt, cached=family == "phi3") for prompt in prompts]
    runner, device = load(tmp_path, pages=9), DeviceQueue()
    try:
        answers = Answers(runner, device)
        engine = answers.engine()
        found = await answers.end(engine, [answers.begin(prompt) for prompt in prompts])
        assert found == expected
        assert engine.scheduler.outgrown == 3
        assert engine.scheduler.preemptions > 0
        for known in (1, 29, 30, 31, 45):  # of the first, whose text has SHORT tokens after 30
            again = answers.begin(prompts[0], expected[0][:known])
            assert await answers.end(answers.engine(), [again]) == [expected[0]]
    finally:
        device.close()
        runner.close()


async def test_pages_of_short_and_long_texts_are_never_mixed(tmp_path: Path) -> None:
    """A long text finds the pages of long ones, a short text those of short ones, and neither finds the other's."""
    torch.set_num_threads(1)
    family, chosen = odd("phi")
    random_models.write(tmp_path, family, chosen)
    runner, device = load(tmp_path), DeviceQueue()
    try:
        answers = Answers(runner, device)
        engine, prompt = answers.engine(), text(1, SHORT - 2)

        async def found(tokens: list[int], new: int = 1) -> int:
            """Return how many tokens of a prompt were found computed."""
            made = answers.begin(tokens, new=new)
            await answers.end(engine, [made])
            return made.choices[0].sequence.cached

        assert await found(prompt) == 0
        assert await found(prompt) == SHORT // PAGE * PAGE
        assert await found([*prompt, *text(2, 40)]) == 0
        assert await found([*prompt, *text(2, 40)]) == (SHORT - 2 + 40) // PAGE * PAGE
        assert await found([*prompt, *text(3, 40)]) == SHORT // PAGE * PAGE
        assert await found(prompt[:65]) == SHORT // PAGE * PAGE
        assert engine.scheduler.outgrown == 0
        grown = answers.begin(other := text(4, SHORT - 2))
        (answer,) = await answers.end(engine, [grown])
        assert engine.scheduler.outgrown == 1
        assert await found([*other, *answer]) == (SHORT - 2 + NEW - 1) // PAGE * PAGE
        assert await found(other) == SHORT // PAGE * PAGE
    finally:
        device.close()
        runner.close()
