"""The RETRO-type network: what a position may see, one token at a time, and generation with retrieval beside it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.errors import ConfigError
from engine.models.retro.database import ChunkDatabase, Neighbour, values
from engine.models.retro.decoding import RetroDecoder
from engine.models.retro.files import load_retro, save_retro
from engine.models.retro.generation import RetroGenerator
from engine.models.retro.network import PAD, RetroConfig, RetroNetwork

TINY = RetroConfig(
    vocabulary=40, hidden=32, layers=3, heads=2, ffn=32, encoder_hidden=16, encoder_layers=1, encoder_ffn=16,
    cross=(0, 2), chunk=4, neighbours=2, window=12,
)  # fmt: skip


def network(seed: int = 0) -> RetroNetwork:
    """Return a tiny random network whose cross-attention says much."""
    torch.manual_seed(seed)
    found = RetroNetwork(TINY).eval()
    with torch.no_grad():
        for weight in found.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.4)
    return found


NETWORK = network()


def near(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal but for the order of sums."""
    return torch.allclose(a, b, rtol=1e-3, atol=3e-4)


def drawn(rng: np.random.Generator, *shape: int) -> Tensor:
    """Return random tokens, none of them padding."""
    return torch.from_numpy(rng.integers(1, TINY.vocabulary, shape))


@torch.inference_mode()
def logits(ids: Tensor, neighbours: Tensor, first: int, interval: int) -> Tensor:
    """Return what the network says of all positions at once."""
    found: Tensor = NETWORK(ids, neighbours, first, interval)
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9), st.integers(0, 3))
def test_nothing_later_is_seen(seed: int, first: int, interval: int, retrievals: int) -> None:
    """A later token, or neighbours retrieved after a later one, change no earlier logits; they do change their own."""
    rng = np.random.default_rng(seed)
    tokens = first + interval * retrievals + int(rng.integers(0, 8))
    ids = drawn(rng, 2, tokens)
    neighbours = drawn(rng, 2, retrievals, TINY.neighbours, TINY.value)
    before = logits(ids, neighbours, first, interval)

    place = int(rng.integers(0, tokens))
    other = ids.clone()
    other[:, place] = ids[:, place] % (TINY.vocabulary - 1) + 1
    after = logits(other, neighbours, first, interval)
    assert near(after[:, :place], before[:, :place])
    assert not near(after[:, place], before[:, place])

    for retrieval in range(retrievals):
        other = neighbours.clone()
        other[:, retrieval] = drawn(rng, 2, TINY.neighbours, TINY.value)
        after = logits(ids, other, first, interval)
        begin = first - 1 + retrieval * interval  # it predicts the first token after the retrieval
        assert near(after[:, :begin], before[:, :begin])
        assert not near(after[:, begin], before[:, begin])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9), st.integers(0, 4))
def test_one_token_at_a_time_is_all_at_once(
    seed: int, first: int, interval: int, retrievals: int
) -> None:
    """Reading piece by piece, far beyond the window, gives the logits of the whole."""
    rng = np.random.default_rng(seed)
    tokens = max(1, first - 1 + interval * retrievals) + int(rng.integers(0, 30)) * (
        retrievals == 0
    )
    ids = drawn(rng, 2, tokens)
    neighbours = drawn(rng, 2, retrievals, TINY.neighbours, TINY.value)
    neighbours[rng.random(neighbours.shape) < 0.2] = PAD
    expected = logits(ids, neighbours, first, interval)

    decoder, found = RetroDecoder(NETWORK, 2), []
    with torch.inference_mode():
        while decoder.length < tokens:
            at = decoder.length
            number, part = divmod(at + 1 - first, interval)
            if part == 0 and 0 <= number < retrievals:
                decoder.attend_to(neighbours[:, number])
            stops = [first - 1 + n * interval for n in range(retrievals)]
            end = min([s for s in stops if s > at] + [tokens])
            found.append(decoder.read(ids[:, at : min(end, at + int(rng.integers(1, 5)))]))
    assert near(torch.cat(found, 1), expected)


def test_without_neighbours_the_network_is_a_decoder() -> None:
    """No retrieval, and neighbours of padding alone, are the same; one neighbour of padding does not count."""
    rng = np.random.default_rng(1)
    ids = drawn(rng, 1, 10)
    nothing = torch.full((1, 2, TINY.neighbours, TINY.value), PAD)
    plain = logits(ids, nothing[:, :0], 3, 4)
    assert near(logits(ids, nothing, 3, 4), plain)

    one = nothing.clone()
    one[:, :, 0] = drawn(rng, 1, 2, TINY.value)
    turned = one.flip(2)  # neighbours have no order
    assert not near(logits(ids, one, 3, 4)[:, 2:], plain[:, 2:])
    assert near(logits(ids, turned, 3, 4), logits(ids, one, 3, 4))


@given(st.lists(st.integers(1, 99), max_size=40), st.integers(0, 40), st.integers(1, 20), st.data())
def test_shift_drops_and_refills(
    document: list[int], begin: int, tokens: int, data: st.DataObject
) -> None:
    """A shifted value lacks its first tokens and goes on behind; where the document ends, padding does."""
    shift = data.draw(st.integers(0, 50))
    neighbour = Neighbour(np.asarray(document, np.int64), begin)
    whole = document[begin:] + [PAD] * (tokens + shift)

    assert neighbour.value(tokens, shift) == whole[shift : shift + tokens]
    assert values([neighbour], 2, tokens, shift)[1] == [PAD] * tokens


def counts(windows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return how often each token occurs, as unit vectors."""
    found = np.stack([np.bincount(list(w), minlength=40) for w in windows]).astype(np.float32)
    found[:, PAD] = 0
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def test_the_search_is_exact_over_every_chunk() -> None:
    """Every chunk of every document is there, and the nearest are found in order."""
    rng = np.random.default_rng(2)
    documents = [rng.integers(1, 40, size).tolist() for size in (4, 9, 30)]
    database = ChunkDatabase(documents, 4, counts)
    windows = [rng.integers(1, 40, 4).tolist() for _ in range(20)]

    assert len(database) == 1 + 3 + 8
    assert [database[n].value(4) for n in range(2)] == [documents[0], documents[1][:4]]
    scores = counts(windows) @ database.vectors.T
    for window, row, numbers in zip(windows, scores, database.search(windows, 3), strict=True):
        assert row[numbers].tolist() == sorted(row.tolist(), reverse=True)[:3]
        assert database.retriever(3)(window) == [database[number] for number in numbers]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7), st.integers(1, 26), st.data())
def test_generation_is_the_same_however_it_waits(
    seed: int, interval: int, tokens: int, data: st.DataObject
) -> None:
    """Pipelined and sequential texts are equal at equal staleness, and what the network says of the retrievals made."""
    stale = data.draw(st.integers(0, interval))
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 40, int(rng.integers(1, 20))).tolist()
    documents = [rng.integers(1, 40, 12).tolist() for _ in range(9)]
    database = ChunkDatabase(documents, TINY.chunk, counts)
    asked: list[list[int]] = []

    def retrieve(window: Sequence[int]) -> Sequence[Neighbour]:
        asked.append(list(window))
        return database.retriever(2)(window)

    generator = RetroGenerator(NETWORK)
    beside = generator.generate(prompt, tokens, retrieve, interval, stale)
    queries = asked.copy()
    after = generator.generate(prompt, tokens, retrieve, interval, stale, pipelined=False)

    text, first = prompt + beside.tokens, len(prompt)
    points = list(range(first, first + tokens, interval))
    lates = [0] + [stale] * (len(points) - 1)
    assert after.tokens == beside.tokens
    assert [(r.token, r.stale) for r in beside.retrievals] == list(zip(points, lates, strict=True))
    ends = [point - late for point, late in zip(points, lates, strict=True)]
    assert sorted(queries) == sorted(text[:end][-TINY.chunk :] for end in ends)
    rows = [
        values(r.neighbours, 2, TINY.value, late)
        for r, late in zip(beside.retrievals, lates, strict=True)
    ]
    said = logits(torch.tensor([text]), torch.tensor([rows]), first, interval)[0, first - 1 : -1]
    best = said.max(-1).values
    chosen = said.gather(1, torch.tensor(beside.tokens)[:, None])[:, 0]
    assert near(chosen, best)


def test_a_retrieval_runs_while_tokens_are_made() -> None:
    """The second retrieval is under way while tokens of the first interval are still to come; a failure is raised."""
    made, begun = threading.Event(), threading.Event()
    calls = 0

    def choose(row: Tensor) -> int:
        assert begun.wait(30)  # the second retrieval, while the first interval's tokens are chosen
        made.set()
        return int(row.argmax())

    def retrieve(window: Sequence[int]) -> Sequence[Neighbour]:
        nonlocal calls
        calls += 1
        if calls > 1:
            begun.set()
            assert made.wait(30)
        return []

    found = RetroGenerator(NETWORK).generate([1, 2], 12, retrieve, 4, choose=choose)
    assert len(found.tokens) == 12
    assert [note.token for note in found.retrievals] == [2, 6, 10]

    def fail(window: Sequence[int]) -> Sequence[Neighbour]:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        RetroGenerator(NETWORK).generate([1, 2], 12, fail, 4)
    with pytest.raises(ValueError, match="staleness 5 at interval 4"):
        RetroGenerator(NETWORK).generate([1, 2], 12, fail, 4, 5)
    alone = RetroGenerator(NETWORK).generate([1, 2], 12, None)
    assert (len(alone.tokens), alone.retrievals) == (12, [])


def test_a_model_directory_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Weights come back in bfloat16's precision; a directory that holds no such model is named."""
    save_retro(NETWORK, tmp_path)
    config = (tmp_path / "config.json").read_text()
    found = load_retro(tmp_path)

    assert found.config == TINY
    for name, weight in NETWORK.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight.bfloat16().float())
    for broken in (b"", b"\xff" * 100):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ConfigError, match="expected the weights"):
            load_retro(tmp_path)
    save_retro(RetroNetwork(replace(TINY, hidden=16)), tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="expected the weights"):
        load_retro(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="expected the weights"):
        load_retro(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected model_type"):
        load_retro(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a config\.json"):
        load_retro(tmp_path / "absent")
