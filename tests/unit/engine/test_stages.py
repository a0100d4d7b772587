"""A step in stages gives what a step in one call gives, wherever sequences are at home and whoever attends to them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.engine import random_models
from bench.engine.stepping import Scatter
from common.pages.identity import PAGE
from common.types.generation import SamplingParams
from engine.decoder.executor.interface import (
    HomeMoves,
    LocalTier,
    PageMove,
    SamplingRequest,
    SequenceInput,
    StepFailed,
)
from engine.decoder.executor.torch_executor import TorchExecutor

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0)
NO_ID = bytes(16)
# What a plan of each mode makes of a sequence: where new ones are at home, who attends there, and the sub-batch.
MODES = ("device", "simple", "symmetric", "full", "swap", "asymmetric", "any")


class Model(NamedTuple):
    """An executor, and transformers' own model of the same weights where the arithmetic is fp32."""

    executor: TorchExecutor
    oracle: Any
    texts: dict[tuple[int, ...], list[int]]  # greedy text by prompt, as steps in one call give it


COMPILED = [
    "llama fp32", "qwen2 fp32", "qwen3 bf16", "mistral int8", "mistral fp32", "gemma2 fp32",
    "gemma3_text int8", "olmo2 fp32",
]  # fmt: skip


@pytest.fixture(scope="module", params=[*COMPILED, "qwen2 torch", "gemma3_text torch"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    family, kind = str(request.param).split()
    chosen = random_models.windowed(family, 2)
    if family == "llama":
        chosen |= {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    directory = tmp_path_factory.mktemp(family)
    oracle = random_models.write(directory, family, chosen)
    executor = TorchExecutor.load(
        str(directory), device="cpu", dtype="fp32" if kind == "torch" else kind, threads=1, kv_bytes=4 << 20,
        host_bytes=4 << 20, host_threads=2, compiled=kind != "torch",
    )  # fmt: skip
    yield Model(executor, oracle if kind in {"fp32", "torch"} else None, {})
    executor.close()


class Chat:
    """One sequence that is decoded greedily: its tokens, its pages in its home, and what is computed."""

    def __init__(self, tiers: dict[LocalTier, Scatter], prompt: list[int], home: LocalTier) -> None:
        self.tiers, self.prompt, self.home = tiers, prompt, home
        self.tokens, self.computed, self.borrowed = list(prompt), 0, 0
        self.pages: list[list[int]] = [[] for _ in tiers[home].free]

    def share(self, other: Chat) -> None:
        """Take the pages of another sequence's common tokens, as far as they are full."""
        common = 0
        while common < min(other.computed, len(self.prompt) - 1) and (
            self.prompt[common] == other.tokens[common]
        ):
            common += 1
        if other.home == self.home and not self.computed:
            self.borrowed = common // PAGE
            self.computed = self.borrowed * PAGE
            self.pages = [list(held[: self.borrowed]) for held in other.pages]

    def rows(self, count: int, attended: LocalTier, part: int) -> SequenceInput:
        """Return the next rows of the prompt, or the row of the last token, with pages for them."""
        end = min(self.computed + count, len(self.tokens))
        for group, table in enumerate(self.pages):
            while len(table) * PAGE < end:
                table.append(self.tiers[self.home].take(group))
        sample = None
        if end == len(self.tokens):
            output = self.tokens[len(self.prompt) :]
            sample = SamplingRequest(GREEDY, 0, end, self.prompt, output)
        span = range(self.computed, end)
        return SequenceInput(
            self.tokens[self.computed : end], span, [list(table) for table in self.pages], sample,
            home=self.home, attended=attended, part=part,
        )  # fmt: skip

    def move(self) -> list[PageMove]:
        """Change the home; the pages it leaves may be taken by others at once."""
        to: LocalTier = "host" if self.home == "device" else "device"
        moves = []
        for group, table in enumerate(self.pages):
            for at, page in enumerate(table):
                target = self.tiers[to].take(group)
                kind: Literal["load", "save"] = "save" if to == "host" else "load"
                moves.append(PageMove(kind, group, NO_ID, page, target))
                if at >= self.borrowed:
                    self.tiers[self.home].give(group, page)
                table[at] = target
        self.home, self.borrowed = to, 0
        return moves


def _alone(model: Model, prompt: list[int], count: int) -> list[int]:
    """Return the greedy text of a prompt by steps in one call over pages on the device."""
    known = model.texts.setdefault(tuple(prompt), [])
    if len(known) >= count:
        return known[:count]
    chat = Chat({"device": Scatter(model.executor, random.Random(1))}, prompt, "device")
    while len(chat.tokens) < len(prompt) + count:
        rows = chat.rows(1000, "device", 0)
        [token] = model.executor.execute([rows])
        assert token is not None
        chat.computed = len(chat.tokens)
        chat.tokens.append(token.token)
    known[:] = chat.tokens[len(prompt) :]
    return known[:count]


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    worst = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    return bool((worst <= TOLERANCE).all())


def _same(executor: TorchExecutor, found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found, expected) if executor.exact else _near(found, expected)


def _place(mode: str, chat: Chat, decodes: bool, draw: random.Random) -> tuple[LocalTier, int]:
    """Return who attends to a sequence in this step, and its sub-batch, as plans of a mode have it."""
    if chat.home == "device":
        return "device", draw.randrange(2) if mode in {"symmetric", "any"} else 0
    if mode == "any":
        return draw.choice(["device", "host"]), draw.randrange(2)
    if mode == "swap" or not decodes:
        return "device", 0  # a prompt at home on the host: its pages leave layer by layer
    if mode == "asymmetric":
        return "host", int(draw.random() < 0.8)
    return "host", 0 if mode == "simple" else draw.randrange(2)


@pytest.mark.parametrize("model", COMPILED, indirect=True)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), mode=st.sampled_from(MODES))
def test_all_modes_give_the_text_of_the_device_alone(model: Model, seed: int, mode: str) -> None:
    """Random steps: prompts in chunks beside decoding, shared pages, moves between homes in mid-sequence."""
    executor, draw = model.executor, random.Random(seed)
    assert executor.stages is not None
    before = dict(executor.stages.attended)
    tiers: dict[LocalTier, Scatter] = {
        tier: Scatter(executor, random.Random(seed)) for tier in ("device", "host")
    }
    head = [draw.randrange(random_models.VOCABULARY) for _ in range(70)]
    chats: list[Chat] = []
    for number in range(4):
        tail = [draw.randrange(random_models.VOCABULARY) for _ in range(draw.randint(1, 90))]
        home: LocalTier = "host" if number % 2 or mode in {"simple", "full"} else "device"
        home = "device" if mode == "device" else home
        chats.append(Chat(tiers, head[: draw.choice([0, 40, 70])] + tail, home))
    goal = draw.randint(3, 12)
    while running := [chat for chat in chats if len(chat.tokens) < len(chat.prompt) + goal]:
        moves: list[PageMove] = []
        batch, took = [], []
        # Changes of homes first: the rows of this step may take the pages that others leave.
        for chat in running:
            fixed = mode in {"device", "simple", "full"} or any(other.borrowed for other in chats)
            if chat.computed and not fixed and draw.random() < 0.15:
                moves += chat.move()
        for chat in running:
            if draw.random() < 0.2:
                continue
            if not chat.computed and draw.random() < 0.7:
                chat.share(draw.choice(chats))
            decodes = len(chat.tokens) > len(chat.prompt)
            rows = chat.rows(draw.choice([1, 33, 200]), *_place(mode, chat, decodes, draw))
            batch.append(rows)
            took.append(chat)
        drawn = executor.execute_staged(batch, moves=HomeMoves(moves))
        for chat, rows, token in zip(took, batch, drawn, strict=True):
            chat.computed += len(rows.tokens)
            if token is not None:
                chat.tokens.append(token.token)

    for chat in chats:
        assert chat.tokens[len(chat.prompt) :] == _alone(model, chat.prompt, goal)
    if mode not in {"device", "swap", "any"}:
        assert executor.stages.attended["host"] > before["host"]
    if mode not in {"simple", "full"}:
        assert executor.stages.attended["device"] > before["device"]


@pytest.mark.parametrize("attended", ["device", "host"])
def test_logits_are_those_of_the_device_and_of_transformers(
    model: Model, attended: LocalTier
) -> None:
    """All rows of a sequence at home on the host have the bits of one at home on the device, but for torch's."""
    executor = model.executor
    draw = random.Random(3)
    tiers: dict[LocalTier, Scatter] = {tier: Scatter(executor, draw) for tier in ("device", "host")}
    tokens = [draw.randrange(random_models.VOCABULARY) for _ in range(150)]
    plain, hosted, other = (Chat(tiers, tokens, home) for home in ("device", "host", "host"))
    expected = executor.logits([plain.rows(150, "device", 0)])
    found = []
    while hosted.computed < 150:
        rows = hosted.rows(draw.choice([1, 7, 40]), attended, 1)
        beside = other.rows(len(rows.tokens), "host", 0)
        logits = executor.staged_logits([beside, rows])
        assert _same(executor, logits[: len(rows.tokens)], logits[len(rows.tokens) :])
        found.append(logits[len(rows.tokens) :])
        hosted.computed += len(rows.tokens)
        other.computed += len(rows.tokens)

    assert _same(executor, torch.cat(found), expected)
    if model.oracle is not None:
        truth = random_models.oracle(model.oracle, tokens)
        assert _near(expected, truth)


@torch.inference_mode()
def test_a_step_that_fails_has_moved_its_pages_and_names_the_sequence(model: Model) -> None:
    """Numbers that are not finite fail their sequence alone; the step is executed again and moves nothing twice."""
    executor = model.executor
    draw = random.Random(4)
    tiers: dict[LocalTier, Scatter] = {tier: Scatter(executor, draw) for tier in ("device", "host")}
    tokens = [draw.randrange(random_models.VOCABULARY) for _ in range(40)]
    moved, spoiled = Chat(tiers, tokens, "device"), Chat(tiers, tokens[:20], "host")
    executor.execute([moved.rows(39, "device", 0)._replace(sample=None)])
    moved.computed = 39
    executor.execute_staged([spoiled.rows(19, "host", 0)])
    spoiled.computed = 19
    assert executor.stages is not None
    executor.stages.host[0].data[spoiled.pages[0][0]].fill_(float("nan"))
    moves = HomeMoves(moved.move())
    batch = [spoiled.rows(1, "host", 1), moved.rows(1, "host", 0)]

    with pytest.raises(StepFailed) as failed:
        executor.execute_staged(batch, moves=moves)

    assert failed.value.index == 0
    executor.stages.device[0].data[moves.moves[0].source].fill_(float("nan"))  # another's by now
    [token] = executor.execute_staged(batch[1:], moves=moves)
    assert token is not None
    assert [token.token] == _alone(model, tokens, 1)
    executor.stages.device[0].data.zero_()
    executor.stages.host[0].data.zero_()


def test_pages_that_nobody_can_attend_to_are_refused(model: Model) -> None:
    """Sequences at home on the device are not attended on the host, and a step in stages draws one token."""
    tiers: dict[LocalTier, Scatter] = {"device": Scatter(model.executor, random.Random(5))}
    rows = Chat(tiers, [5, 6], "device").rows(2, "host", 0)

    with pytest.raises(ValueError, match="attended to on the device"):
        model.executor.execute_staged([rows])
    assert rows.sample is not None
    with pytest.raises(ValueError, match="ahead"):
        model.executor.execute_staged([rows._replace(attended="device", ahead=[rows.sample])])
