"""A step of sequences over both tiers, the front on the host, gives what it gives with all pages in one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from bench.engine import random_models
from bench.engine.stepping import Scatter
from common.pages.identity import CHUNK, PAGE
from engine.decoder.executor.interface import HomeMoves, LocalTier, PageMove, SequenceInput
from engine.decoder.executor.torch_executor import TorchExecutor

KINDS = ("llama fp32", "qwen3 bf16", "olmo2 int8", "qwen2 torch")
NEAR = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TorchExecutor]:
    family, kind = str(request.param).split()
    chosen = random_models.settings(family, 2) | {
        "sliding_window": None,
        "use_sliding_window": False,
    }
    chosen |= {"layer_types": ["full_attention"] * chosen["num_hidden_layers"]}
    if family == "llama":
        chosen |= {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    directory = tmp_path_factory.mktemp(family)
    random_models.write(directory, family, chosen)
    found = TorchExecutor.load(
        str(directory), device="cpu", dtype="fp32" if kind == "torch" else kind, threads=1, kv_bytes=4 << 20,
        host_bytes=4 << 20, host_threads=2, compiled=kind != "torch",
    )  # fmt: skip
    yield found
    found.close()


class Text:
    """One sequence: its tokens, and its pages, of which the first `front` are on the host."""

    def __init__(self, tiers: dict[LocalTier, Scatter], tokens: list[int]) -> None:
        self.tiers, self.tokens = tiers, tokens
        self.front = 0
        self.pages: list[list[int]] = [[] for _ in tiers["device"].free]

    def rows(self, start: int, end: int, part: int = 0) -> SequenceInput:
        """Return the rows at some positions, with pages for them."""
        for group, table in enumerate(self.pages):
            while len(table) * PAGE < end:
                table.append(self.tiers["device"].take(group))
        return SequenceInput(
            self.tokens[start:end], range(start, end), [list(table) for table in self.pages],
            part=part, front=self.front,
        )  # fmt: skip

    def change(self, front: int) -> list[PageMove]:
        """Leave first pages to the host, or take them back; the pages that it leaves may be taken at once."""
        moves, old = [], self.front
        kind: Literal["load", "save"] = "save" if front > old else "load"
        ends: tuple[LocalTier, LocalTier] = (
            ("device", "host") if kind == "save" else ("host", "device")
        )
        for group, table in enumerate(self.pages):
            for at in range(min(old, front), max(old, front)):
                target = self.tiers[ends[1]].take(group)
                moves.append(PageMove(kind, group, bytes(16), table[at], target))
                self.tiers[ends[0]].give(group, table[at])
                table[at] = target
        self.front = front
        return moves


def _same(executor: TorchExecutor, found: torch.Tensor, expected: torch.Tensor) -> bool:
    if executor.exact:
        return torch.equal(found, expected)
    worst = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    return bool((worst <= NEAR).all())


@pytest.mark.parametrize("seed", range(3))
def test_logits_over_both_tiers_are_those_of_one(executor: TorchExecutor, seed: int) -> None:
    """Rows of a prompt and decode rows, while the front grows and comes back, beside sequences with other homes.

    Steps have two parts, each with rows of every kind; bits are equal where the kernels are compiled.
    """
    draw = random.Random(seed)
    tiers: dict[LocalTier, Scatter] = {tier: Scatter(executor, draw) for tier in ("device", "host")}
    tokens = [draw.randrange(random_models.VOCABULARY) for _ in range(470)]
    plain, split, beside = (Text(tiers, tokens) for _ in range(3))
    expected = executor.logits([plain.rows(0, 470)])
    executor.logits([split.rows(0, 270)])
    executor.logits([beside.rows(0, 270)])
    hosted = Text({"device": tiers["host"]}, tokens)
    executor.staged_logits([hosted.rows(0, 400, 1)._replace(home="host", attended="host")])
    both, at = executor.on_both, 270
    moves = split.change(CHUNK)
    while at < 470:
        end = min(470, at + draw.choice((1, 1, 3, 40)))
        part = draw.randrange(2)
        batch = [
            beside.rows(at, end, 1 - part),
            hosted.rows(399, 400, 1)._replace(home="host", attended="host"),
            split.rows(at, end, part),
        ]
        logits = executor.staged_logits(batch, moves=HomeMoves(moves))
        count = end - at
        assert _same(executor, logits[-count:], expected[at:end])
        assert _same(executor, logits[:count], expected[at:end])
        assert _same(executor, logits[count : count + 1], expected[399:400])
        at = end
        fronts = [0, CHUNK] if at < 2 * CHUNK * PAGE else [0, CHUNK, 2 * CHUNK]
        moves = split.change(draw.choice(fronts)) if draw.random() < 0.3 else []

    assert executor.on_both > both


def test_several_with_one_front(executor: TorchExecutor) -> None:
    """Sequences share the pages of a front on the host: each finds there what it would find in pages of its own."""
    draw = random.Random(7)
    tiers: dict[LocalTier, Scatter] = {tier: Scatter(executor, draw) for tier in ("device", "host")}
    head = [draw.randrange(random_models.VOCABULARY) for _ in range(CHUNK * PAGE)]
    tails = [[draw.randrange(random_models.VOCABULARY) for _ in range(50)] for _ in range(3)]
    texts = [Text(tiers, head + tail) for tail in tails]
    expected = [
        executor.logits([Text(tiers, each.tokens).rows(0, len(each.tokens))]) for each in texts
    ]
    first = Text(tiers, head)
    executor.logits([first.rows(0, len(head))])
    executor.execute_staged([], moves=HomeMoves(first.change(CHUNK)))
    for text in texts:
        text.front, text.pages = CHUNK, [list(table) for table in first.pages]

    found = executor.staged_logits(
        [text.rows(len(head), len(text.tokens), number % 2) for number, text in enumerate(texts)]
    )

    for number, each in enumerate(expected):
        assert _same(executor, found[50 * number : 50 * (number + 1)], each[len(head) :])


def test_fronts_of_other_homes_are_refused(executor: TorchExecutor) -> None:
    """A sequence at home on the host has no front, and a front is whole chunks before all rows."""
    draw = random.Random(8)
    tiers: dict[LocalTier, Scatter] = {tier: Scatter(executor, draw) for tier in ("device", "host")}
    rows = Text(tiers, [5] * 300).rows(299, 300)
    for wrong, said in (
        (rows._replace(front=8, home="host"), "has no front"),
        (rows._replace(front=3), "multiple of 8"),
        (rows._replace(tokens=[5] * 300, positions=range(300), front=8), "lies in its front"),
    ):
        with pytest.raises(ValueError, match=said):
            executor.execute_staged([wrong])
