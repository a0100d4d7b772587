"""G1Q: its prompts, its texts, passages that are placed, and a short run whose tables its figures read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.document import BenchOptions
from bench.engine import random_models
from bench.engine.slot_reader import SlotReader
from bench.engine.slot_replacement import HOWS, SlotAnswers
from bench.suites import g1q
from bench.workloads.reports import CHUNK, Reports
from bench.workloads.slot_prompts import SlotPrompt, SlotPrompts
from common.errors import ConfigError
from common.pages.identity import PAGE
from engine.decoder.executor.torch_executor import TorchExecutor
from tests.unit.bench.test_interval_rows import whole

PASSAGES = ["Pudia has  nine mills.", "The mayor of Pudia is Orla Tam."]


def _random(folder: Path, family: str, **more: object) -> TorchExecutor:
    random_models.write(folder, family, random_models.settings(family, 3) | more)
    return TorchExecutor.load(str(folder), device="cpu", dtype="fp32", threads=1, kv_bytes=4 << 20)


@pytest.fixture(scope="module")
def shipped() -> TorchExecutor:
    return TorchExecutor.load(
        "spillway-demo", device="cpu", dtype="fp32", threads=1, kv_bytes=64 << 20
    )


def test_passages_stand_where_the_prompt_says(shipped: TorchExecutor, tmp_path: Path) -> None:
    """Each passage's tokens are its text, whichever side of the question it is on; without any there are none."""
    prompts = SlotPrompts(shipped, tmp_path)

    for place, question_last in (("before", True), ("after", False)):
        prompt = prompts.made("Who is its mayor?", PASSAGES, place)  # type: ignore[arg-type]
        texts = [prompts.tokenizer.decode(prompt.tokens[a:b]) for a, b in prompt.spans]
        assert [text.strip() for text in texts] == [" ".join(each.split()) for each in PASSAGES]
        rest = prompts.tokenizer.decode(prompt.tokens[prompt.spans[-1][1] :])
        assert ("Who is its mayor?" in rest) == question_last
    assert prompts.made("Who?", [], "after").spans == []


def test_facts_of_a_report_are_its_values(shipped: TorchExecutor, tmp_path: Path) -> None:
    """The places that are judged hold values of facts; passages are those of a point on, shifted if they are stale."""
    tokenizer = SlotPrompts(shipped, tmp_path).tokenizer
    reports = Reports(tokenizer, 2, 3, 192, 1)

    for number, report in enumerate(reports.reports):
        assert report.values
        facts = [tokenizer.decode(report.tokens[a:b]).strip(" .,") for a, b in report.values]
        assert all(fact and fact[0].isalnum() for fact in facts)
        assert all(CHUNK <= a < b <= len(report.tokens) for a, b in report.values)
        fresh = reports.passages(number, 64, "sequential")
        once = reports.passages(number, 64, "once")
        late = reports.passages(number, 64, "pipelined")
        assert len(fresh) == len(reports.points(number, 64)) == 2
        assert once == [fresh[0]] * 2
        assert late[0] == fresh[0]
        assert late != reports.passages(number, 64, "pipelined, not shifted")
        assert reports.passages(number, 64, "none") == [[], []]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_placed_passage_of_one_layer_is_exact(family: str, tmp_path: Path) -> None:
    """In a single layer keys and values know nothing of other tokens, so a passage may be placed anywhere."""
    executor = _random(tmp_path, family, num_hidden_layers=1, use_sliding_window=False)
    reader, draw = SlotReader(executor), torch.Generator().manual_seed(1)
    tokens = torch.randint(3, random_models.VOCABULARY, (150,), generator=draw).tolist()
    prompt = SlotPrompt(tokens, [(3, 40), (41, 44), (60, 130)])

    exact = reader.predicted(tokens, tokens[:20], 5)
    placed = reader.approximated(prompt, tokens[:20], 5)
    assert exact.shape == (15, random_models.VOCABULARY)
    torch.testing.assert_close(placed, exact, atol=1e-4, rtol=1e-4)


def test_a_placed_passage_of_several_layers_is_not(tmp_path: Path) -> None:
    """With more layers it is an approximation, except right behind the token that it was computed behind."""
    executor = _random(tmp_path, "llama")
    reader, tokens = SlotReader(executor), [*range(3, 100)]

    exact = reader.predicted(tokens, tokens[:20], 5)
    first = reader.approximated(SlotPrompt(tokens, [(1, 50)]), tokens[:20], 5)
    later = reader.approximated(SlotPrompt(tokens, [(20, 50)]), tokens[:20], 5)
    torch.testing.assert_close(first, exact, atol=1e-4, rtol=1e-4)
    assert (later - exact).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["gemma3_text", "smollm3"])
def test_who_is_refused(family: str, tmp_path: Path) -> None:
    """Keys of layers with a window, or that no position turns, are not placed; the message says what is expected."""
    random_models.write(tmp_path, family, random_models.windowed(family, 1))
    executor = TorchExecutor.load(
        str(tmp_path), device="cpu", dtype="fp32", threads=1, kv_bytes=4 << 20
    )
    with pytest.raises(ConfigError, match=r"layers all see the whole text and turn their keys"):
        SlotReader(executor).approximated(SlotPrompt([*range(3, 60)], [(5, 30)]), [3, 4], 1)


def test_answers_are_the_same_however_a_prompt_is_replaced(tmp_path: Path) -> None:
    """All ways write the same tokens; only what they compute differs."""
    answers = SlotAnswers(_random(tmp_path, "llama"))
    head, question = [*range(3, 75)], [*range(90, 110)]
    prompts = [[*head, *([number] * (30 + number)), *question] for number in (80, 81, 82, 80)]

    found = {how: answers.write(prompts, g1q.WRITTEN, how) for how in HOWS}
    replaced = found["replaced"]
    assert [each.tokens for each in found.values()] == [replaced.tokens] * len(HOWS)
    assert len(replaced.tokens) == 4 * g1q.WRITTEN
    assert found["read anew"].computed == [
        len(prompt) + g1q.WRITTEN * number for number, prompt in enumerate(prompts[1:], 1)
    ]
    assert replaced.computed == g1q.least_computed(prompts, replaced.tokens)
    assert found["read anew, pages found"].computed == replaced.computed
    whole_pages = len(head) // PAGE * PAGE
    assert replaced.computed[0] == len(prompts[1]) + g1q.WRITTEN - whole_pages
    assert replaced.computed[-1] < len(
        prompts[3]
    )  # its passages were there before, and its answer's first chunk


def test_a_short_run(tmp_path: Path) -> None:
    """Every table and figure is there, and what does not depend on the texts reaches its goal."""
    body = g1q.run(BenchOptions(quick=True, setup_dir=tmp_path))

    whole("G1Q", body)
    assert [body.met[each] for each in (g1q.SAME, g1q.LEAST)] == ["goal", "goal"]
    reading, placed, costs = body.tables
    assert len(reading["rows"]) == 9
    assert [row[0] for row in placed["rows"]] == ["before", "after"]
    assert len(costs["rows"]) == len(g1q.PLACES) * len(HOWS)
