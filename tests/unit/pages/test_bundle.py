"""Pages outside of a mesh: read as they come, renamed for whoever takes them, and refused where they are damaged."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.errors import SpillwayError
from common.pages import codec
from common.pages.bundle import FORMAT, BundleHeader, BundleReader, Renaming, named
from common.pages.chain import Chain
from common.pages.codec import CorruptPage, Header
from common.pages.identity import (
    PAGE,
    long_root,
    root_id,
    short_context,
    text_pages,
    with_short_context,
)
from common.pages.keys import PageKey
from common.wire.sessions import Turn

HERE, THERE = root_id("f", "here"), root_id("f", "there")
HEAD = BundleHeader(FORMAT, "m", "f", THERE.hex(), 3)


def turn(history: int, tokens: list[int]) -> Turn:
    """A turn of these tokens."""
    return Turn(
        job="j",
        history=history,
        messages=b"[]",
        answer="",
        prompt=tokens[: len(tokens) // 2],
        output=tokens[len(tokens) // 2 :],
        finish="stop",
        at_ms=0,
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns that go on, or begin anew with a part of what was before."""
    turns: list[Turn] = []
    held = 0
    for _ in range(draw(st.integers(1, 5))):
        history = draw(st.integers(0, held)) if draw(st.booleans()) else held
        said = [draw(st.integers(0, 3))] * draw(st.integers(1, 3 * PAGE))
        turns.append(turn(history, said))
        held = history + len(said)
    return turns


def chain(root: bytes, turns: list[Turn], short_context: int = 0) -> Chain:
    """The chain of some turns."""
    made = Chain(root, short_context)
    for one in turns:
        made.add(one)
    return made


def value(key: PageKey, layer_bytes: int = 100) -> bytes:
    """A sound page as a worker may have put it: its parent unknown."""
    rng = random.Random(key.member)
    head = Header(
        id=key.id, parent=bytes(16), depth=0, layers=2, layer_bytes=layer_bytes, group=key.group
    )
    return codec.encode(head, [rng.randbytes(layer_bytes) for _ in range(2)])


def read(data: bytes, sizes: list[int]) -> list[tuple[Header, bytes]]:
    """Read a bundle that comes in parts of these sizes."""
    reader, found, at = BundleReader(), [], 0
    for size in [*sizes, len(data)]:
        found += list(reader.feed(data[at : at + size]))
        at += size
    reader.end()
    assert reader.head == HEAD
    return found


@given(conversations(), st.just(0) | st.integers(1, 5 * PAGE))
def test_a_chain_is_what_its_turns_filled(turns: list[Turn], short: int) -> None:
    """It has every full page that was ever there, after its parent; the same under any root.

    Of a model with a short context these are the pages of each text while it was short, and while it was long.
    """
    fingerprint = with_short_context("0f", short)
    here_root, there_root = root_id(fingerprint, "here"), root_id(fingerprint, "there")
    tokens: list[int] = []
    expected = set()
    for one in turns:
        prompt = tokens[: one.history] + one.prompt
        tokens = prompt + one.output
        for length in {len(prompt), min(max(short, len(prompt)), len(tokens)), len(tokens)}:
            expected |= set(text_pages(fingerprint, "here", tokens[:length]))
    assert short_context(fingerprint) == short
    here, there = (chain(root, turns, short) for root in (here_root, there_root))
    assert set(here.places) == expected
    assert len(there.places) == len(here.places)
    for own, other in zip(here.places.values(), there.places.values(), strict=True):
        assert own.depth == other.depth
        assert (own.parent in (here_root, long_root(here_root))) == (own.depth == 0)
        assert own.depth == 0 or here.places[own.parent].depth == own.depth - 1


@given(conversations(), st.lists(st.integers(0, 700), max_size=20))
def test_pages_come_back_under_other_names(turns: list[Turn], sizes: list[int]) -> None:
    """However the bytes come, each page is one of the same tokens here, its layers as they were."""
    source, target = chain(THERE, turns), chain(HERE, turns)
    keys = [PageKey(page, group) for page in source.places for group in range(2)]
    data = HEAD.encode()
    for key in keys:
        data += named(value(key), key, source.places[key.id])
    found = read(data, sizes)
    assert [header.id for header, _ in found] == [key.id for key in keys]
    renaming, ids = Renaming(source, target), list(target.places)
    for number, (header, bytes_) in enumerate(found):
        assert (header.parent, header.depth) == source.places[header.id]
        renamed = renaming.rename(header, bytes_)
        assert renamed is not None
        assert renamed[0] == PageKey(ids[number // 2], number % 2)
        assert codec.check(renamed[1], renamed[0].id) == []
        assert renamed[1][64:] == value(keys[number])[64:]
        assert codec.read_header(renamed[1]).parent == target.places[renamed[0].id].parent


ONE = chain(THERE, [turn(0, [1] * PAGE)])
KEY = PageKey(next(iter(ONE.places)))


def test_foreign_and_damaged_pages_are_told_apart() -> None:
    """A page of another conversation or of no group there is has no name here; one with a flipped bit is damaged."""
    renaming = Renaming(ONE, chain(HERE, [turn(0, [1] * PAGE)]))
    data = value(KEY)
    header = codec.read_header(data)
    assert renaming.rename(header, data) is not None
    for other in (replace(header, id=bytes(16)), replace(header, group=8)):
        assert renaming.rename(other, data) is None
    for at in (64, 170, len(data) - 1):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(CorruptPage, match="layers"):
            renaming.rename(header, bytes(bad))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ends after 0 bytes"),
        (b"x" * 5000, "first line has more than 4096"),
        (b"{}\n", "first line: Object missing required field"),
        (b"{\n", "first line"),
        (b"\xff\n", "first line"),
        (replace(HEAD, format="spillway.pages/2").encode(), "'spillway.pages/2'"),
        (replace(HEAD, root="00").encode(), "root '00'"),
        (replace(HEAD, root="xy").encode(), "first line: non-hexadecimal"),
        (HEAD.encode() + bytes(64), "at byte 112: page header"),
        (HEAD.encode() + value(KEY)[:-1], "in the middle of a page"),
        (HEAD.encode() + value(KEY) + b"x", "in the middle of a page"),
    ],
)
def test_what_is_no_bundle(data: bytes, why: str) -> None:
    """It is refused, with the place and what is wrong there."""
    with pytest.raises(SpillwayError, match="these are no pages to import") as refused:
        read(data, [])
    assert (refused.value.code, refused.value.http_status) == ("invalid_pages", 400)
    assert why in refused.value.message


def test_a_page_that_would_fill_the_memory() -> None:
    """It is refused by what its header says, before it has come."""
    head = Header(id=KEY.id, parent=bytes(16), depth=0, layers=1 << 20, layer_bytes=1 << 20)
    with pytest.raises(SpillwayError, match="at most 134217728 are allowed") as refused:
        read(HEAD.encode() + codec.header_bytes(head), [])
    assert refused.value.http_status == 413
