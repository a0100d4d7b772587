"""The model that ships: its files agree with each other and with what the router relies on."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from models.demo import evaluate
from models.demo.batches import BATCH_TOKENS, batches, gaps
from models.demo.export import export, state_of, tensors
from models.demo.network import Network, Size, initialise, rotations
from models.demo.tokens import Encoder
from models.demo.world import tasks
from models.demo.world.conversations import Message, Shape, conversation, ground

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """Return the shipped tokenizer."""
    return Encoder.load()


@cache
def template(name: str) -> jinja2.Template:
    """Return a template as the router compiles it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((DEMO / name).read_text())


def rendered(messages: list[Message], *, ask: bool) -> str:
    """Return the chat template's text."""
    rows = [{"role": m.role, "content": m.content} for m in messages]
    return template("chat_template.jinja").render(messages=rows, add_generation_prompt=ask)


def talk(seed: int) -> list[Message]:
    """Return a conversation of several turns."""
    return conversation(random.Random(seed), Shape((3, 5), (1, 3), (3, 5), small_talk=0.5))


def test_the_directory_is_small_and_the_model_within_bounds() -> None:
    """At most 40 MB, 3 to 10 million parameters, 2,048 tokens, and a context of 4,096."""
    config = json.loads((DEMO / "config.json").read_text())
    files = [p for p in DEMO.rglob("*") if p.is_file() and ".checkpoints" not in p.parts]
    with safe_open(DEMO / "model.safetensors", "pt") as weights:
        count = sum(weights.get_tensor(k).numel() for k in weights.keys())  # noqa: SIM118

    assert sum(p.stat().st_size for p in files) <= 40e6
    assert 3e6 <= count <= 10e6
    assert config["vocab_size"] <= 2048
    assert config["max_position_embeddings"] == 4096
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_training_can_go_on_from_the_shipped_weights() -> None:
    """The network takes them, and writes the same ones."""
    shipped = load_file(DEMO / "model.safetensors")
    net = Network(Size())
    net.load_state_dict(state_of(shipped, net.size))
    again = tensors(net.state_dict(), net.size)

    assert again.keys() == shipped.keys()
    assert all(torch.equal(again[name], weight) for name, weight in shipped.items())


def test_the_chat_template_only_appends() -> None:
    """A conversation's rendering begins with that of its beginning; an answer follows its prompt."""
    for seed in range(20):
        messages = talk(seed)
        whole = rendered(messages, ask=False)
        for k, m in enumerate(messages):
            assert whole.startswith(rendered(messages[:k], ask=False))
            if m.role == "assistant":
                prompt = rendered(messages[:k], ask=True)
                assert rendered(messages[: k + 1], ask=False) == f"{prompt}{m.content}<|end|>"


def test_training_and_the_template_agree(encoder: Encoder) -> None:
    """What the model was trained on are the tokens of what the router renders."""
    for seed in range(20):
        messages = talk(seed)
        ids, said = encoder.conversation(messages)

        assert (
            encoder.tokenizer.encode(rendered(messages, ask=False), add_special_tokens=False).ids
            == ids
        )
        assert encoder.tokenizer.encode(
            rendered(messages[:1], ask=True), add_special_tokens=False
        ).ids == (encoder.prompt(messages[:1]))
        assert sum(said) == sum(
            len(encoder.text(m.content)) + 1 for m in messages if m.role == "assistant"
        )


def test_the_grounding_template_is_what_was_trained() -> None:
    """`grounding.jinja` gives, from passages with any white space, what training conversations hold."""
    for texts in (["# A\n\nB  c.\nD.", "E f."], ["one"], []):
        passages: list[dict[str, Any]] = [
            {"index": n, "document_id": f"d{n}", "text": t} for n, t in enumerate(texts, 1)
        ]
        made = template("grounding.jinja").render(passages=passages, question="Who is it?")

        assert made == ground(texts, "Who is it?")


def test_any_text_comes_back_from_the_tokenizer(encoder: Encoder) -> None:
    """The tokenizer is byte-level: it loses nothing."""
    for text in ("Čeština, 中文, 🙂\n\ttabs", "  spaces  ", "The river of Dalton is Tona [12]."):
        assert Tokenizer.decode(encoder.tokenizer, encoder.text(text)) == text


def test_transformers_computes_what_was_trained(encoder: Encoder, tmp_path: Path) -> None:
    """An exported network has the same logits under LlamaForCausalLM."""
    from transformers import AutoModelForCausalLM

    size = Size(vocabulary=encoder.tokenizer.get_vocab_size(), layers=2)
    net = Network(size)
    initialise(net, 3)
    export(net.state_dict(), size, encoder, tmp_path)
    causal: Any = AutoModelForCausalLM
    model = causal.from_pretrained(tmp_path).eval()
    ids = torch.tensor([encoder.conversation(talk(1))[0]])
    with torch.no_grad():
        ours = net(ids, *rotations(size, torch.arange(ids.shape[1])[None]), None)
        theirs = model(ids).logits[0]

    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_batches_are_a_function_of_seed_and_pool(encoder: Encoder) -> None:
    """The same pool gives the same batches, of bounded size, with rising positions below the context."""
    one, two = (next(batches(encoder, 1, 5, 2.0, 0.0)) for _ in range(2))

    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.positions, two.positions)
    assert one.ids.numel() <= BATCH_TOKENS * 1.1
    for seed in range(30):
        where = gaps(random.Random(seed), list(range(300)), {7, 80, 200}, 4096)
        assert where == sorted(set(where))
        assert where[-1] < 4096


def test_the_card_states_the_measured_figures() -> None:
    """The model card's table is made of `figures.json`, to the letter."""
    figures = json.loads((DEMO / "figures.json").read_text())

    assert evaluate.table(figures) in (DEMO / "README.md").read_text()
    for name in ("present", "absent", "turn 2", "turn 3", "handbook"):
        assert figures[name]["questions"] >= 1000
    assert figures["free questions"]["questions"] == 100


def test_free_questions_are_about_handbook_pages() -> None:
    """Each hand-written question names a page, and that page states what it asks."""
    rows = evaluate.free_questions()

    assert len(rows) == len({r[0] for r in rows}) == 100
    assert all(value for _, value, _, _ in rows)


def test_the_shipped_model_answers() -> None:
    """Where the card says it does: most of 24 held-out questions, in a right form or refused."""
    figures = json.loads((DEMO / "figures.json").read_text())
    model = evaluate.Model(str(DEMO))
    asked = [tasks.present(i) for i in range(24)]
    said = model.answer([t.prompt for t in asked])
    right = sum(tasks.score(t, s).exact for t, s in zip(asked, said, strict=True)) / len(asked)

    assert right >= figures["present"]["right"] - 0.25
