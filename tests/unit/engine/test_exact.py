"""One sequence, computed in any pieces, on any pages, in any company, gives the same logits and the same text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bench.engine import exactness, random_models
from bench.engine.stepping import Line, Scatter
from common.cost.step import Step
from common.pages.identity import PAGE, root_id
from common.types.generation import SamplingParams
from engine.decoder.capacity import DecoderCapacity
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.interface import EarlyEnd, SamplingRequest, SequenceInput, StepFailed
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sampling.sampler import draw_tokens
from engine.decoder.scheduler import Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence
from engine.device import DeviceQueue
from engine.models.decoders.cuda_graphs import GraphedDecoder

TOLERANCE = 1e-4
LENGTH = 200
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


COMPILED = [
    "llama fp32", "qwen2 bf16", "qwen3 int8", "mistral int4", "mistral fp32", "gemma3_text bf16",
    "smollm3 int4",
]  # fmt: skip
TORCH = ["llama torch", "qwen2 torch", "qwen3 torch", "mistral torch", "gemma2 torch"]


@pytest.fixture(scope="module", params=[*COMPILED, *TORCH])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TorchExecutor:
    """Return a runner of each family; Qwen's have layers with and without a window, Mistral's all have one.

    What is compiled is exact to the last bit, whatever the weights are made into.
    """
    family, kind = str(request.param).split()
    directory = tmp_path_factory.mktemp(family)
    random_models.write(directory, family, random_models.windowed(family, 1))
    made = TorchExecutor.load(
        str(directory),
        device="cpu",
        dtype="fp32" if kind == "torch" else kind,
        threads=1 if kind == "torch" else 2,
        kv_bytes=8 << 20,
        compiled=kind != "torch",
    )
    assert made.exact == (kind != "torch")
    return made


def _tokens(seed: int, count: int = LENGTH) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(random_models.VOCABULARY) for _ in range(count)]


def _whole(runner: TorchExecutor, tokens: list[int]) -> torch.Tensor:
    line = Line(Scatter(runner, random.Random(1)), tokens)
    return runner.logits([line.next_rows(len(tokens))])


def _same(runner: TorchExecutor, found: torch.Tensor, expected: torch.Tensor) -> bool:
    if runner.exact:
        return torch.equal(found, expected)
    worst = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    return bool((worst <= TOLERANCE).all())


@pytest.mark.parametrize("chunk", [1, 32, 33])
def test_chunks(runner: TorchExecutor, chunk: int) -> None:
    """In chunks of any size, with the pages that leave the windows given away and taken by others."""
    tokens = _tokens(1)
    draw = random.Random(chunk)
    scatter = Scatter(runner, draw)
    line = Line(scatter, tokens)
    rows, gone = [], 0
    while line.computed < LENGTH:
        rows.append(runner.logits([line.next_rows(chunk)]))
        gone += line.leave_windows(runner.shape.windows)
        other = Line(scatter, _tokens(draw.randrange(100), 40))
        runner.logits([other.next_rows(40)])
        other.close()

    assert _same(runner, torch.cat(rows), _whole(runner, tokens))
    assert (gone > 0) == any(window is not None for window in runner.shape.windows)


@pytest.mark.parametrize("seed", range(5))
def test_missing_ranges(runner: TorchExecutor, seed: int) -> None:
    """Pages lost anywhere, leading, middle or last, are recomputed with the new prompt, at once or over steps."""
    tokens = _tokens(2)
    draw = random.Random(seed)
    kept = draw.randrange(100, LENGTH - 5)
    expected = _whole(runner, tokens)
    scatter = Scatter(runner, draw)
    line = Line(scatter, tokens)
    runner.logits([line.next_rows(kept)])
    lost = draw.sample(range(kept // PAGE), draw.randrange(1, kept // PAGE + 1))
    line.lose(lost)
    spoiler = Line(scatter, _tokens(9, 64))  # others write where those pages were
    runner.logits([spoiler.next_rows(64)])
    gone = set(lost)
    missing = [at for at in range(LENGTH) if at >= kept or at // PAGE in gone]
    budget = draw.choice((7, 50, 500))

    rows = [
        runner.logits([line.rows(missing[at : at + budget])])
        for at in range(0, len(missing), budget)
    ]

    assert _same(runner, torch.cat(rows), expected[missing])


@pytest.mark.parametrize("runner", ["mistral fp32", "mistral torch"], indirect=True)
def test_windowed_pages_can_be_rebuilt(runner: TorchExecutor) -> None:
    """Under a window, rows are recomputed from a resident stretch of its length, with holes before it."""
    tokens = _tokens(3)
    window = runner.shape.windows[0]
    assert window is not None
    line = Line(Scatter(runner, random.Random(3)), tokens)
    runner.logits([line.next_rows(LENGTH)])
    line.lose(range((130 - window) // PAGE))
    line.lose([5])  # positions 160 to 191

    found = runner.logits([line.rows([*range(160, 192), LENGTH - 1])])

    assert _same(runner, found, _whole(runner, tokens)[[*range(160, 192), LENGTH - 1]])


def test_mixed_batches(runner: TorchExecutor) -> None:
    """Chunks of prefill and decode rows of many sequences in one batch, in random company, against each alone."""
    draw = random.Random(5)
    scatter = Scatter(runner, draw)
    texts = [_tokens(seed, draw.randrange(2, 120)) for seed in range(12)]
    lines = [Line(scatter, text) for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in lines]
    while open_ := [n for n, line in enumerate(lines) if line.computed < len(line.tokens)]:
        chosen = draw.sample(open_, draw.randrange(1, len(open_) + 1))
        batch = [lines[n].next_rows(draw.choice((1, 1, 1, 5, 40))) for n in chosen]
        logits = runner.logits(batch)
        counts = [len(rows.tokens) for rows in batch]
        for n, part in zip(chosen, torch.split(logits, counts), strict=True):
            found[n].append(part)
            lines[n].leave_windows(runner.shape.windows)

    for text, rows in zip(texts, found, strict=True):
        assert _same(runner, torch.cat(rows), _whole(runner, text))


def _drawn_by_rounding(runner: TorchExecutor, draw: SamplingRequest) -> set[int]:
    """Return the tokens that a draw may give if logits are off by as much as they may be."""
    logits = _whole(runner, [*draw.prompt, *draw.output])[-1]
    noise = torch.rand((4096, len(logits)), generator=torch.Generator().manual_seed(1)) * 2 - 1
    rows = logits + TOLERANCE * logits.abs().max() * noise
    return {each.token for each in draw_tokens(rows, [draw] * len(rows))}


def test_sampled_text_does_not_depend_on_the_company(runner: TorchExecutor) -> None:
    """Eight sampled sequences generated together and one by one are the same.

    torch rounds otherwise in other company: there a draw may fall between two tokens, each of which rounding explains.
    """
    prompts = [_tokens(seed, 5 + 9 * seed) for seed in range(8)]
    sampling = SamplingParams(temperature=1.0, top_p=0.9, repetition=1.1, seed=77)

    together = exactness.generate(runner, prompts, 24, sampling, seed=1)

    for n, prompt in enumerate(prompts):
        alone = exactness.generate(runner, [prompt], 24, sampling, seed=2, first=n)[0]
        if runner.exact or together[n] == alone:
            assert together[n] == alone
            continue
        same = [one == other for one, other in zip(together[n], alone, strict=True)].index(False)
        draw = SamplingRequest(sampling, n, len(prompt) + same, prompt, alone[:same])
        assert {together[n][same], alone[same]} <= _drawn_by_rounding(runner, draw)
    assert len({tuple(output) for output in together}) == len(prompts)


def test_scheduled_text_is_the_text_alone(runner: TorchExecutor) -> None:
    """The real scheduler, with shared beginnings, few pages, preemption and chunks: the text of each alone."""
    draw = random.Random(1)
    heads = [_tokens(50 + n, 70) for n in range(2)]
    prompts = [
        [*heads[n % 2][: draw.choice((40, 64, 70))], *_tokens(n, draw.randrange(1, 60))]
        for n in range(9)
    ]
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=1)
    scheduler = Scheduler(runner.shape._replace(pages=8), StepLimits(tokens=48, running=6))
    sequences = [
        TokenSequence("job", n, n, prompt, root=root_id("f", ""), most=len(prompt) + 40)
        for n, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        assert scheduler.fits(sequence)
        scheduler.add(sequence)
    while parts := scheduler.step():
        batch = [
            SequenceInput(
                part.sequence.at(part.positions),
                part.positions,
                part.sequence.pages,
                SamplingRequest(
                    sampling,
                    part.sequence.choice,
                    part.sequence.length,
                    part.sequence.prompt,
                    part.sequence.output,
                )
                if part.draws
                else None,
            )
            for part in parts
        ]
        for part, drawn in zip(parts, runner.execute(batch), strict=True):
            scheduler.commit(part, drawn.token if drawn else None)
            if part.sequence.length == part.sequence.most:
                scheduler.drop([part.sequence])

    alone = [
        exactness.generate(runner, [prompt], 40, sampling, seed=2, first=n)[0]
        for n, prompt in enumerate(prompts)
    ]
    assert [sequence.output for sequence in sequences] == alone
    assert scheduler.preemptions > 0
    assert any(sequence.cached > 0 for sequence in sequences)


def test_shared_pages(runner: TorchExecutor) -> None:
    """Two sequences share full pages; neither sees what the other writes after them."""
    scatter = Scatter(runner, random.Random(6))
    prompt = _tokens(4, 75)
    first = Line(scatter, [*prompt, *_tokens(5, 30)])
    second = Line(scatter, [*prompt, *_tokens(6, 30)])
    runner.execute([first.rows(range(75))])
    second.pages = [table[:2] for table in first.pages]

    both = runner.logits([first.rows(range(75, 105)), second.rows(range(64, 105))])

    assert _same(runner, both[:30], _whole(runner, first.tokens)[75:])
    assert _same(runner, both[30:], _whole(runner, second.tokens)[64:])


def test_only_asked_rows_are_drawn(runner: TorchExecutor) -> None:
    """Sequences in prefill give nothing, the others a token each, in the batch's order."""
    scatter = Scatter(runner, random.Random(7))
    lines = [Line(scatter, _tokens(seed, 20)) for seed in range(3)]
    draws = [None, SamplingRequest(GREEDY, 0, 20, [], []), None]
    batch = [line.next_rows(20, draw) for line, draw in zip(lines, draws, strict=True)]

    drawn = runner.execute(batch)

    assert drawn[0] is drawn[2] is None
    assert drawn[1] is not None
    assert drawn[1].token == int(_whole(runner, lines[1].tokens)[-1].argmax())
    assert runner.execute([]) == []


def test_a_row_outside_the_model_is_named(runner: TorchExecutor) -> None:
    """Tokens outside the vocabulary and positions that do not match are a caller's error."""
    table = [[0] for _ in runner.shape.windows]

    with pytest.raises(ValueError, match="sequence 0: a token id outside 0 to 127"):
        runner.execute([SequenceInput([500], [0], table)])
    with pytest.raises(ValueError, match="sequence 0: 2 tokens at 1 positions"):
        runner.execute([SequenceInput([5, 6], [0], table)])


def test_numbers_that_are_not_finite_are_named_and_leave_nothing_behind(tmp_path: Path) -> None:
    """The sequence is named; the others' step succeeds without it, and its pages spoil nobody after it."""
    chosen = {**random_models.settings("llama", 1), "tie_word_embeddings": False}
    random_models.write(tmp_path, "llama", chosen)
    runner = TorchExecutor.load(
        str(tmp_path), device="cpu", dtype="fp32", threads=1, kv_bytes=1 << 20
    )
    decoder = runner._decoder
    assert not isinstance(decoder, GraphedDecoder)
    with torch.inference_mode():
        decoder._embed[7] = float("nan")  # files with such weights are refused
    scatter = Scatter(runner, random.Random(8))
    good, bad = Line(scatter, [1, 2, 3]), Line(scatter, [4, 5, 7, 6])
    sample = SamplingRequest(GREEDY, 0, 3, [], [])
    rows, wrong = good.next_rows(3, sample), bad.next_rows(4)

    with pytest.raises(StepFailed, match="states at positions 0 to 3 are not finite") as caught:
        runner.execute([rows, wrong])

    assert caught.value.index == 1
    alone = runner.execute([rows])[0]
    assert alone is not None
    next_ = Line(scatter, [1, 2, 3])
    next_.pages = [list(table) for table in bad.pages]
    after = runner.execute([next_.rows([0, 1, 2], sample)])[0]
    assert after == alone


@pytest.mark.parametrize("family", random_models.FAMILIES)
def test_exactness_table(family: str) -> None:
    """The measurement that the docs quote, at a small count: logits and greedy text against transformers."""
    row = exactness.measure(family, sequences=6, seed=11)

    assert row.sequences == 6
    assert row.logits_whole <= TOLERANCE
    assert row.logits_mixed <= TOLERANCE
    assert row.different == 0
    assert row.excused <= 1


def test_several_tokens_a_step(runner: TorchExecutor) -> None:
    """Tokens computed one after another in a step, by the kernels' own draw or another, are those of as many steps."""
    scatter = Scatter(runner, random.Random(12))
    prompts = [_tokens(seed, 30 + seed) for seed in range(3)]
    bans = [(), tuple(range(20)), tuple(range(64, 128))]

    def drawn(*, plain: bool, together: bool, early: EarlyEnd | None = None) -> list[list[int]]:
        lines = [Line(scatter, [*prompt, *[0] * 8]) for prompt in prompts]
        for line in lines:
            line.rows(range(len(line.tokens)))  # all pages are there
        found: list[list[int]] = [[] for _ in lines]
        while len(found[0]) < 6:
            done = len(found[0])
            count = 5 if together and done else 1
            batch = []
            for line, prompt, ban, known in zip(lines, prompts, bans, found, strict=True):
                end = len(prompt) + done
                draws = [
                    SamplingRequest(GREEDY, 0, end + n, prompt, known, ban, -1 if plain else 0)
                    for n in range(count)
                ]
                line.tokens[len(prompt) : end] = known
                first = end - 1 if done else 0
                rows = line.rows(range(first, end), draws[0])
                batch.append(rows._replace(ahead=draws[1:]))
            for known, token in zip(found, runner.execute(batch, None, early), strict=True):
                assert token is not None
                known += [token.token, *(each.token for each in token.then)]
            if early is not None and done:
                break
        return found

    alone = drawn(plain=False, together=False)
    assert drawn(plain=True, together=False) == alone
    assert drawn(plain=True, together=True) == alone
    assert drawn(plain=False, together=True) == alone
    ended = EarlyEnd()
    ended.ask()
    assert drawn(plain=True, together=True, early=ended) == [tokens[:2] for tokens in alone]
    assert not any(
        token in ban for tokens, ban in zip(alone, bans, strict=True) for token in tokens
    )


def test_a_token_beyond_the_pages_is_refused(runner: TorchExecutor) -> None:
    """Tokens whose rows would have no page are a caller's error, named before anything is computed."""
    table = [[0] for _ in runner.shape.windows]
    draws = [SamplingRequest(GREEDY, 0, 32 + n, [], []) for n in range(3)]
    with pytest.raises((ValueError, IndexError)):
        runner.execute([SequenceInput([5], [PAGE - 1], table, draws[0], (), draws[1:])])


@pytest.mark.parametrize("runner", COMPILED, indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_guesses_change_no_text(runner: TorchExecutor, temperature: float) -> None:
    """Streams of which tokens are guessed and computed ahead get the tokens that they get one by one."""
    plain, _ = await _generate(runner, temperature, lookup=False)
    guessed, right = await _generate(runner, temperature, lookup=True)
    assert guessed == plain
    several, _ = await _generate(runner, temperature, lookup=False, several=4)
    assert several == plain
    both, _ = await _generate(runner, temperature, lookup=True, several=4)
    assert both == plain
    assert right > 0


async def _generate(
    runner: TorchExecutor, temperature: float, *, lookup: bool, several: int = 1
) -> tuple[list[list[int]], int]:
    """Return the tokens of three streams that repeat two tokens, and how many were guessed right."""
    probes = [(Step(1, 1, 1.0), 1e-3), (Step(4, 4, 8.0), 1e-3), (Step(1, 64, 2000.0), 1e-3)]
    capacity = DecoderCapacity(probes, slo_s=60.0, context=runner.shape.context, fixed=True)
    device = DeviceQueue()
    try:
        engine = DecoderEngine(
            runner, capacity, StepLimits(64, 8), device, lookup=lookup, several=several
        )
        request = GenerationRequest(
            "r",
            [_tokens(seed, 20) * 3 for seed in range(3)],
            StopRules(80),
            root_id(runner.fingerprint, ""),
            sampling=SamplingParams(
                temperature=temperature, seed=7, bias=dict.fromkeys((5, 6), 50.0)
            ),
        )
        generation = Generation(request, Vocabulary(runner.tokenizer_json()), 0)
        engine.add(generation)
        while not engine.idle:
            await engine.step()
            engine.scheduler.check()
    finally:
        device.close()
    return [list(choice.tokens) for choice in generation.choices], engine.accepted
