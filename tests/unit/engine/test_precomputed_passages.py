"""Passages computed alone and put into prompts: transformers' numbers, kept for other prompts, never mistaken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine import random_models
from common.pages.identity import PAGE, root_id
from common.types.generation import SamplingParams
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.interface import SequenceInput
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.passage_rows import placed
from engine.decoder.scheduler import StepLimits
from engine.decoder.sequence import TokenSequence
from engine.device import DeviceQueue
from engine.models.decoders.cuda_graphs import GraphedDecoder
from tests.support.precomputed import Span, oracle, passage, prompt_of

TOLERANCE = 1e-4
NEW = 24
PASSAGES = [passage(1, 50), passage(2, 33), passage(3, 5)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def made(
    folder: Path, family: str = "llama", *, compiled: bool = True, pages: int = 0, **more: Any
) -> tuple[Any, TorchExecutor]:
    """Return a random model of transformers, and the executor that has loaded it."""
    passage_bytes = more.pop("passage_bytes", 1 << 20)
    chosen = random_models.settings(family, 3) | more
    model = random_models.write(folder, family, chosen)
    loaded = TorchExecutor.load(
        str(folder),
        device="cpu",
        dtype="fp32",
        threads=1,
        kv_bytes=8 << 20,
        compiled=compiled,
        passage_bytes=passage_bytes,
    )
    if pages:
        size = sum(loaded.shape.page_bytes)
        loaded = TorchExecutor.load(
            str(folder),
            device="cpu",
            dtype="fp32",
            threads=1,
            kv_bytes=pages * size,
            compiled=compiled,
            passage_bytes=passage_bytes,
        )
    return model, loaded


def sequence(tokens: Sequence[int], spans: Sequence[Span], scope: str = "t") -> TokenSequence:
    return TokenSequence("j", 0, 0, tokens, root=root_id("f", scope), most=500, spans=spans)


def logits(
    executor: TorchExecutor, tokens: Sequence[int], spans: Sequence[Span], chunk: int = 500
) -> torch.Tensor:
    """Return the executor's logits of all tokens outside of spans, computed in chunks of positions."""
    text, rows = sequence(tokens, spans), []
    pages = [list(reversed(range(-(-len(tokens) // PAGE))))] * len(executor.shape.windows)
    for start in range(0, len(tokens), chunk):
        some = range(start, min(len(tokens), start + chunk))
        computed, places = placed(text, some)
        asked = SequenceInput(text.at(computed), computed, pages, places=places)
        if computed:
            rows.append(executor.logits([asked]))
        else:
            assert executor.execute([asked]) == [None]
    return torch.cat(rows)


ROPES = [
    pytest.param(
        "llama", {"rope_parameters": {"rope_theta": 10_000.0, **rope}}, id=rope["rope_type"]
    )
    for rope in random_models.ROPES
]
OTHERS = [
    pytest.param("qwen3", {"use_sliding_window": False}, id="qwen3"),
    pytest.param("granite", {}, id="granite"),
    pytest.param(
        "phi3",
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        id="phi3, a part of each head",
    ),
]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("family", "settings"), [*ROPES, *OTHERS])
def test_logits_are_those_of_transformers(
    family: str, settings: dict[str, Any], compiled: bool, tmp_path: Path
) -> None:
    """Each passage is computed behind the first token alone, and its keys are turned to its place."""
    model, executor = made(tmp_path, family, compiled=compiled, **settings)
    assert executor.precomputes
    tokens, spans = prompt_of(PASSAGES)

    found, expected = logits(executor, tokens, spans), oracle(model, tokens, spans)
    assert found.shape == expected.shape
    worst = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert bool((worst <= TOLERANCE).all()), worst.max()
    # It is an approximation: what is computed in the prompt is another thing.
    exact = random_models.oracle(model, tokens)[-1]
    assert (exact - expected[-1]).abs().max() > 10 * TOLERANCE * exact.abs().max()


def test_a_passage_computed_again_has_the_same_bits(tmp_path: Path) -> None:
    """Found in the store, computed anew, or placed in pieces: the same bits; the store's counts say which it was."""
    _, executor = made(tmp_path, compiled=True)
    _, forgetful = made(tmp_path / "again", compiled=True, passage_bytes=0)
    tokens, spans = prompt_of(PASSAGES)
    store = executor.passages
    assert store is not None

    first = logits(executor, tokens, spans)
    assert (store.hits, store.misses) == (0, 3)
    size = store.bytes
    assert size > 0
    assert torch.equal(logits(executor, tokens, spans), first)
    assert (store.hits, store.misses, store.bytes) == (3, 3, size)
    for chunk in (1, 20, 37):
        assert torch.equal(logits(executor, tokens, spans, chunk), first)
        assert torch.equal(logits(forgetful, tokens, spans, chunk), first)
    assert store.misses == 3
    assert forgetful.passages is not None
    assert (forgetful.passages.hits, forgetful.passages.bytes) == (0, 0)


def test_passages_are_found_at_other_places_but_not_by_others(tmp_path: Path) -> None:
    """A passage is found wherever it stands, in prompts of one tenant that begin with the same token."""
    _, executor = made(tmp_path)
    tokens, spans = prompt_of(PASSAGES)
    moved, there = prompt_of(PASSAGES[::-1], before=11, seed=70)
    store = executor.passages
    assert store is not None
    logits(executor, tokens, spans)
    logits(executor, moved, there)
    assert (store.hits, store.misses) == (3, 3)

    other = sequence(tokens, spans, "another tenant")
    computed, places = placed(other, range(len(tokens)))
    pages = [list(range(-(-len(tokens) // PAGE)))]
    executor.logits([SequenceInput(other.at(computed), computed, pages, places=places)])
    assert (store.hits, store.misses) == (3, 6)
    logits(executor, [2, *tokens[1:]], spans)
    assert (store.hits, store.misses) == (3, 9)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("mistral", {"sliding_window": 40}, id="windows"),
        pytest.param(
            "smollm3", {"no_rope_layers": [0, 1, 1], "num_hidden_layers": 3}, id="no RoPE"
        ),
        pytest.param(
            "phi3",
            {
                "sliding_window": None,
                "original_max_position_embeddings": 100,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10_000.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [3.0] * 8,
                },
            },
            id="LongRoPE",
        ),
    ],
)
def test_models_whose_keys_cannot_be_turned_say_so(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Their cards tell it, and a step that asks for it all the same fails."""
    _, executor = made(tmp_path, family, **settings)
    assert not executor.precomputes
    assert executor.passages is None
    assert not executor.card(created_ms=0, partitions=1).precomputes
    tokens, spans = prompt_of(PASSAGES)
    with pytest.raises(ValueError, match="cannot be computed alone"):
        logits(executor, tokens, spans)


def test_attention_on_the_host_says_so(tmp_path: Path) -> None:
    """A step may copy pages that it would have to write first, so a worker with attention on the host refuses."""
    random_models.write(tmp_path, "llama", random_models.settings("llama", 3))
    executor = TorchExecutor.load(
        str(tmp_path),
        device="cpu",
        dtype="fp32",
        threads=1,
        kv_bytes=4 << 20,
        host_bytes=4 << 20,
        host_threads=1,
    )
    assert not executor.precomputes
    tokens, spans = prompt_of(PASSAGES)
    text = sequence(tokens, spans)
    computed, places = placed(text, range(len(tokens)))
    pages = [list(range(-(-len(tokens) // PAGE)))]
    with pytest.raises(ValueError, match="places no passages"):
        executor.execute_staged([SequenceInput(text.at(computed), computed, pages, places=places)])
    executor.close()


# -- the engine ------------------------------------------------------------------------------------------


class Runs:
    """Engines on one executor, with greedy generations."""

    def __init__(self, executor: TorchExecutor, device: DeviceQueue, **more: Any) -> None:
        self.executor = executor
        limits = StepLimits(48, 8)
        probes = measure(executor, limits.tokens, limits.running)
        capacity = DecoderCapacity(probes, slo_s=60.0, context=executor.shape.context, fixed=True)
        self.engine = DecoderEngine(executor, capacity, limits, device, **more)
        self._vocabulary = Vocabulary(executor.tokenizer_json())
        self._order = 0

    def begin(
        self,
        prompt: Sequence[int],
        spans: Sequence[Span],
        *,
        scope: str = "t",
        n: int = 1,
        new: int = NEW,
    ) -> Generation:
        self._order += 1
        request = GenerationRequest(
            f"r{self._order}",
            [prompt],
            StopRules(new),
            root_id(self.executor.fingerprint, scope),
            sampling=SamplingParams(temperature=0.0),
            spans=spans,
            n=n,
        )
        generation = Generation(request, self._vocabulary, 10 * self._order)
        self.engine.add(generation)
        return generation

    async def end(self) -> None:
        """Compute to the end, and check that no page leaks."""
        while not self.engine.idle:
            await self.engine.step()
            self.engine.scheduler.check()

    async def told(self, prompt: Sequence[int], spans: Sequence[Span], **more: Any) -> list[int]:
        generation = self.begin(prompt, spans, **more)
        await self.end()
        assert generation.failure is None, generation.failure
        first, *others = (list(choice.tokens) for choice in generation.choices)
        assert others == [first] * len(others)
        return first


@pytest.fixture
async def device() -> AsyncIterator[DeviceQueue]:
    queue = DeviceQueue()
    yield queue
    queue.close()


def greedy(model: Any, tokens: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """Return what transformers draws after a prompt whose passages are computed alone."""
    said: list[int] = []
    for _ in range(NEW):
        said.append(int(oracle(model, [*tokens, *said], spans)[-1].argmax()))
    return said


@pytest.mark.parametrize("compiled", [True, False])
async def test_answers_are_those_of_transformers(
    device: DeviceQueue, tmp_path: Path, compiled: bool
) -> None:
    """Greedy answers, with steps of fewer rows than a passage has; a second request finds the passages."""
    model, executor = made(tmp_path, compiled=compiled)
    runs = Runs(executor, device, lookup=compiled)
    tokens, spans = prompt_of(PASSAGES)
    expected = greedy(model, tokens, spans)

    assert await runs.told(tokens, spans) == expected
    store = executor.passages
    assert store is not None
    assert store.misses == 3
    hits = store.hits  # pieces of a passage that came in several steps
    assert await runs.told(tokens, spans) == expected
    assert store.misses == 3
    assert store.hits >= hits + 3
    assert await runs.told(tokens, spans, n=3) == expected


async def test_pages_with_approximated_tokens_are_found_by_nobody(
    device: DeviceQueue, tmp_path: Path
) -> None:
    """Without spans the same tokens are computed exactly; pages before the first span are shared both ways."""
    _, executor = made(tmp_path)
    tokens, spans = prompt_of(PASSAGES, before=2 * PAGE)
    expected = await Runs(executor, device).told(tokens, [])
    approximated = await Runs(executor, device).told(tokens, spans)

    runs = Runs(executor, device)
    assert await runs.told(tokens, spans) == approximated
    generation = runs.begin(tokens, [])
    await runs.end()
    assert generation.choices[0].tokens == expected
    assert generation.choices[0].sequence.cached == 2 * PAGE
    generation = runs.begin(tokens, spans)
    await runs.end()
    assert generation.choices[0].tokens == approximated
    assert generation.choices[0].sequence.cached == 2 * PAGE
    assert await runs.told(tokens, []) == expected


async def test_a_sequence_that_loses_its_pages_says_the_same(
    device: DeviceQueue, tmp_path: Path
) -> None:
    """Sequences are preempted by others and begin again, passages included, with what they had said."""
    _, executor = made(tmp_path, pages=14)
    prompts = [prompt_of(PASSAGES[:1], seed=20 + at) for at in range(5)]
    alone = [await Runs(executor, device).told(*each, new=90) for each in prompts]

    runs = Runs(executor, device)
    together = [runs.begin(*each, new=90) for each in prompts]
    await runs.end()
    assert [each.choices[0].tokens for each in together] == alone
    assert runs.engine.scheduler.preemptions > 0


async def test_replaced_passages_are_those_of_a_new_prompt(
    device: DeviceQueue, tmp_path: Path
) -> None:
    """A prompt replaced while the answer is written goes on as transformers does after that prompt and those tokens."""
    model, executor = made(tmp_path)
    runs = Runs(executor, device)
    tokens, spans = prompt_of(PASSAGES)
    other, places = prompt_of([passage(2, 33), passage(8, 61)])
    generation = runs.begin(tokens, spans)
    choice = generation.choices[0]
    while len(choice.tokens) < 8:
        await runs.engine.step()
    store = executor.passages
    assert store is not None
    before = store.misses

    computed = runs.engine.rewrite(choice, other, places)
    said = list(choice.tokens)
    # Rows behind the kept pages, without those of passages.
    outside = len(other) + len(said) - sum(b - a for a, b in places)
    assert computed == outside - places[0][0] // PAGE * PAGE
    await runs.end()
    assert store.misses == before + 1  # the other passage was known
    while len(said) < NEW:
        said.append(int(oracle(model, [*other, *said], places)[-1].argmax()))
    assert choice.tokens == said

    exact = runs.begin(tokens, spans)
    while len(exact.choices[0].tokens) < 8:
        await runs.engine.step()
    runs.engine.rewrite(exact.choices[0], tokens, [])  # the same tokens, now computed in the prompt
    drawn = list(exact.choices[0].tokens)
    await runs.end()
    fresh = random_models.oracle(model, [*tokens, *drawn])[-1]
    assert exact.choices[0].tokens[8] == int(fresh.argmax())


async def test_a_passage_that_is_not_finite_fails_its_request_alone(
    device: DeviceQueue, tmp_path: Path
) -> None:
    """Its keys are neither placed nor kept; a request of the same step, and one without the passage, go on."""
    _, executor = made(tmp_path, tie_word_embeddings=False)
    decoder = executor._decoder
    assert not isinstance(decoder, GraphedDecoder)
    tokens, spans = prompt_of([[4] * 20], seed=3, after=3)
    runs = Runs(executor, device)
    expected = await runs.told(tokens, spans)
    store = executor.passages
    assert store is not None
    held = store.bytes
    spoiled = next(
        at for at in range(3, random_models.VOCABULARY) if at not in {*tokens, *expected}
    )
    with torch.inference_mode():
        decoder._embed[spoiled] = float("nan")  # files with such weights are refused
    bad, places = prompt_of([[4, spoiled, 5]], seed=3, after=3)

    failing, going = runs.begin(bad, places), runs.begin(tokens, spans)
    await runs.end()
    assert failing.failure is not None
    assert "passage of 3 tokens are not finite" in failing.failure.message
    assert going.choices[0].tokens == expected
    assert store.bytes == held
