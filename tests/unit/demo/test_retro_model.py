"""The RETRO-type model that ships: its chronicles, its training, its files, and that retrieval helps it."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from bench.document import BenchOptions
from bench.figures.targets import FIGURES
from bench.suites import g1p
from engine.models.retro.database import ChunkDatabase
from engine.models.retro.files import SHIPPED, load_retro, load_tokenizer
from engine.models.retro.generation import RetroGenerator
from engine.models.retro.network import PAD, RetroConfig, RetroNetwork
from models.demo.tokens import Encoder
from models.demo.world.names import pool_of
from models.retro.chronicles import chronicle
from models.retro.evaluate import (
    NOTHING,
    TOKENS,
    HeldOutTexts,
    facts_after,
    losses,
    perplexity,
    right_facts,
)
from models.retro.initial import initialise
from models.retro.tokens import CountedTokens, EncodedText
from models.retro.train import Examples, Training


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """Return the shipped tokenizer."""
    return Encoder.load()


@pytest.fixture(scope="module")
def held() -> HeldOutTexts:
    """Return a few held-out texts beside a small database, found by MiniLM."""
    tokenizer = load_tokenizer()
    return HeldOutTexts(tokenizer, EncodedText(tokenizer), 3, 10, RetroConfig().chunk)


def test_both_tellings_state_the_facts_and_no_name_was_trained_on() -> None:
    """Heading by heading, both tellings name every value; an entity's names belong to the pool that was asked for."""
    rng = random.Random(1)
    for _ in range(10):
        made = chronicle(rng, "evaluation")
        for text in (made.stored, made.text):
            sections = text.split("# ")[1:]
            assert [s.split("\n", 1)[0] for s in sections] == [who.name for who, _ in made.told]
            for section, (who, keys) in zip(sections, made.told, strict=True):
                facts = [(who.name, who.facts[key]) for key in keys]
                assert all(right_facts(facts, f"# {section}"))
        assert made.text != made.stored
        for who, _ in made.told:
            assert pool_of(who.name.split()[0]) == "evaluation"
    assert chronicle(random.Random(7), "train") == chronicle(random.Random(7), "train")


def test_examples_show_what_was_asked_for(encoder: Encoder) -> None:
    """Batches are seeded; most neighbours come from the text's own stored telling, and share its names."""
    examples = Examples(encoder, RetroConfig(), 448, 4)
    ids, neighbours = examples.draw("a", without=0)
    again = examples.draw("a", without=0)

    assert torch.equal(ids, again[0])
    assert torch.equal(neighbours, again[1])
    assert ids.shape == (4, 449)
    assert neighbours.shape == (4, 6, 2, 128)
    shared = [
        len(set(row.tolist()) & set(each.flatten().tolist()) - {PAD})
        for row, each in zip(ids, neighbours, strict=True)
    ]
    crossed = [
        len(set(row.tolist()) & set(each.flatten().tolist()) - {PAD})
        for row, each in zip(ids, neighbours.roll(1, 0), strict=True)
    ]
    assert sum(shared) > sum(crossed)
    blind = examples.draw("a", without=1)[1]
    assert not blind.any()


def test_counted_tokens_weigh_rare_ones_most() -> None:
    """A shared rare token brings two windows nearer than a shared common one; vectors have length one."""
    embed = CountedTokens([[1, 2], [1, 3], [1, 4]], 8)
    query, rare, common = embed([[1, 2, 5], [2, 6], [1, 6]])

    assert query @ rare > query @ common
    np.testing.assert_allclose([query @ query, rare @ rare], 1, rtol=1e-5)


def options(directory: Path) -> argparse.Namespace:
    """Return settings of a run of a few steps."""
    return argparse.Namespace(
        minutes=1.0, seed=1, rate=2e-3, batch=1, length=128, directory=directory
    )


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A run that was stopped and goes on has the weights of one that was not; the first ones are the seed's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = Training(options(tmp_path / "none"))
        whole.state["seconds"] = 30.0
        whole.learn()
        stopped = Training(options(tmp_path))
        stopped.state["seconds"] = 30.0
        stopped.learn()
        stopped.save()
        gone_on = Training(options(tmp_path))
        for training in (whole, gone_on):
            training.learn()
    finally:
        torch.set_num_threads(threads)

    assert gone_on.state["step"] == whole.state["step"] == 2
    for name, weight in whole.net.state_dict().items():
        torch.testing.assert_close(gone_on.net.state_dict()[name], weight, msg=name)
    first, again = (RetroNetwork(RetroConfig()) for _ in range(2))
    initialise(first, 3)
    initialise(again, 3)
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))


def test_the_shipped_directory_is_small_and_agrees_with_the_tokenizer() -> None:
    """At most 12 MB, in bfloat16, the vocabulary of the chat model's tokenizer."""
    config = json.loads((SHIPPED / "config.json").read_text())
    with safe_open(SHIPPED / "model.safetensors", "pt") as weights:
        kinds = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118

    assert (SHIPPED / "model.safetensors").stat().st_size <= 12e6
    assert kinds == {torch.bfloat16}
    assert config["vocabulary"] == load_tokenizer().get_vocab_size()


def test_retrieval_lowers_the_perplexity_of_held_out_texts(held: HeldOutTexts) -> None:
    """With its neighbours the model predicts unseen facts better than without, and than with another text's."""
    network = load_retro()
    alone = losses(network, held, NOTHING)
    found, late = losses(network, held, 64), losses(network, held, 64, 64)
    wrong = losses(network, held, 64, wrong=True)

    assert perplexity(found) < 0.95 * perplexity(alone)
    assert perplexity(late) < 0.95 * perplexity(alone)
    assert perplexity(found) < perplexity(wrong)


def test_queries_end_before_what_they_serve(held: HeldOutTexts) -> None:
    """The first query is fresh and the others stale; what they find is shifted by as much."""
    assert held.queries(64, 16) == [64, *range(112, TOKENS - 16, 64)]
    fresh, late = held.neighbours(0, 64, 0, 2), held.neighbours(0, 64, 16, 2)
    unshifted = held.neighbours(0, 64, 16, 2, shifted=False)

    assert late[0] == fresh[0]
    assert [[n.begin - 16 for n in row] for row in late[1:]] == [
        [n.begin for n in row] for row in unshifted[1:]
    ]


def test_facts_are_right_in_their_own_section(held: HeldOutTexts) -> None:
    """A text states its own facts; a value counts in the section of its entity alone."""
    text = held.texts[0]
    facts = facts_after(text, held.tokenizer, 64, TOKENS)
    assert len(facts) >= 12
    assert all(right_facts(facts, text.chronicle.text))
    assert right_facts([("Dal", "tin"), ("Ost", "tin")], "# Dal\n\nIt sells tin.\n\n# Ost\n\nX") == [
        True, False,
    ]  # fmt: skip


def test_the_shipped_model_tells_facts_of_its_database(held: HeldOutTexts) -> None:
    """A generated text names entities that only the database knows; without retrieval it names none."""
    network, text = load_retro(), held.texts[0]
    assert isinstance(held.database, ChunkDatabase)
    prompt = text.tokens[:64]
    names = {who.name for who, _ in text.chronicle.told}

    def named(found: list[int]) -> int:
        said = held.tokenizer.decode(found)
        return sum(name in said for name in names)

    generator = RetroGenerator(network)
    told = generator.generate(prompt, 128, held.database.retriever(2), 64)
    alone = generator.generate(prompt, 128, None)
    assert named(told.tokens) > named(alone.tokens)


def test_a_short_run_of_the_row_has_its_tables(tmp_path: Path) -> None:
    """Every part has a line, and every figure of the row can be told."""
    body = g1p.run(BenchOptions(quick=True, setup_dir=tmp_path))

    for table in body.tables:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    found = {"tables": body.tables, "met": body.met, "samples": body.samples}
    for figure in FIGURES:
        if figure.row == "G1P":
            assert figure.met in body.met
            assert figure.ours(found)
            assert figure.rival(found)
