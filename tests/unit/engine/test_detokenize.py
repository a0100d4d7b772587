"""Text from tokens, one at a time: byte for byte what decoding all gives, and stop strings never delivered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.output.stop_strings import StopStrings
from tests.support import small_tokenizers

KINDS = [small_tokenizers.byte_level, small_tokenizers.sentence_piece, small_tokenizers.metaspace]
VOCABULARIES = {kind.__name__: Vocabulary(kind()) for kind in KINDS}


@pytest.mark.parametrize("kind", sorted(VOCABULARIES))
@given(data=st.data())
def test_pieces_are_the_whole(kind: str, data: st.DataObject) -> None:
    """Any tokens, invalid UTF-8, special and unknown ids included: the pieces concatenate to the whole decoded."""
    vocabulary = VOCABULARIES[kind]
    tokens = data.draw(st.lists(st.integers(0, 310), max_size=60))
    stream = vocabulary.stream()
    pieces = [stream.push(token) for token in tokens]
    pieces.append(stream.flush())

    assert "".join(pieces) == vocabulary.decode(tokens)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])  # those that have special tokens
@given(data=st.data())
def test_special_tokens_that_are_shown(kind: str, data: st.DataObject) -> None:
    """Text between them is what it is alone; they stand between, as the vocabulary writes them."""
    vocabulary = VOCABULARIES[kind]
    special = [token for token in range(310) if vocabulary.name(token) and vocabulary.silent(token)]
    shown = data.draw(st.lists(st.sampled_from(special), min_size=1, max_size=2, unique=True))
    parts = data.draw(st.lists(st.lists(st.integers(0, 310), max_size=9), min_size=1, max_size=4))
    parts = [[token for token in part if token not in shown] for part in parts]
    stream = vocabulary.stream(shown)
    text, expected = "", ""
    for number, part in enumerate(parts):
        if number:
            text += stream.push(shown[number % len(shown)])
            expected += vocabulary.name(shown[number % len(shown)])
        text += "".join(stream.push(token) for token in part)
        expected += vocabulary.decode(part)

    assert text + stream.flush() == expected


@given(st.text(max_size=40))
def test_any_text_streams(text: str) -> None:
    """Encoded text comes back, and no piece holds half a character."""
    vocabulary = VOCABULARIES["byte_level"]
    tokens = vocabulary._tokenizer.encode(text).ids
    stream = vocabulary.stream()
    pieces = [stream.push(token) for token in tokens]

    assert "".join(pieces) == text.replace("<|end|>", "").replace("<|user|>", "")
    assert stream.flush() == ""


def test_a_character_in_parts_is_held_back() -> None:
    """Four byte tokens of one character give nothing, nothing, nothing, and the character."""
    for kind, name in ((VOCABULARIES["byte_level"], None), (VOCABULARIES["sentence_piece"], "a")):
        tokenizer = kind._tokenizer
        ids = (
            [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🎈".encode()]
            if name
            else list(tokenizer.encode("🎈").ids)
        )
        stream = kind.stream()
        pieces = []
        for token in ids:
            assert token is not None
            pieces.append(stream.push(token))
        assert pieces[:-1] == [""] * (len(ids) - 1)
        assert pieces[-1] + stream.flush() == "🎈"


def test_raw_bytes() -> None:
    """A token's bytes, for logprobs: concatenated they are the text's."""
    vocabulary = VOCABULARIES["byte_level"]
    ids = vocabulary._tokenizer.encode("Köln 🎈 <tag>").ids
    assert b"".join(map(vocabulary.raw, ids)) == "Köln 🎈 <tag>".encode()
    assert vocabulary.raw(0) == b""
    assert vocabulary.raw(100_000) == b""


def expected_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What must be delivered of a text that grows character by character."""
    for end in range(len(text) + 1):
        found = [(text[:end].find(stop), order) for order, stop in enumerate(stops)]
        found = [(at, order) for at, order in found if at >= 0]
        if found:
            at, order = min(found)
            return text[:at], stops[order]
    return text, None


@given(
    st.text("ab.\n", max_size=30),
    st.lists(st.text("ab.\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings(text: str, stops: list[str]) -> None:
    """Character by character: exactly the text before the first stop string goes out, and never a part of one."""
    watch, out, stopped = StopStrings(stops), "", None
    for character in text:
        gain, stopped = watch.push(character)
        out += gain
        assert expected_stop(text, stops)[0].startswith(out)
        if stopped is not None:
            break
    else:
        out += watch.flush()

    assert (out, stopped) == expected_stop(text, stops)


def test_a_stop_string_inside_one_token() -> None:
    """A stop string that comes whole, or that begins in one token and ends in another, is cut off."""
    assert StopStrings(["\n\n"]).push("one\n\ntwo") == ("one", "\n\n")
    watch = StopStrings(["STOP", "END"])
    assert watch.push("go ST") == ("go ", None)
    assert watch.push("ARTED S") == ("STARTED ", None)
    assert watch.push("TOP.") == ("", "STOP")
    assert StopStrings(["bc", "ab"]).push("abc") == ("", "ab")
    assert StopStrings([""]).push("x") == ("x", None)


def test_kinds() -> None:
    """The byte-level kind is found by the tokenizer's own description."""
    assert VOCABULARIES["byte_level"]._by_bytes
    assert VOCABULARIES["sentence_piece"]._falls_back
    assert not VOCABULARIES["metaspace"]._by_bytes
