"""Pages as bytes: what is written is read, and no flipped bit, cut or foreign page goes unseen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pages.codec import (
    HEADER_BYTES,
    SUM_BYTES,
    CorruptPage,
    Header,
    check,
    checksum,
    encode,
    layer,
    layers,
    read_header,
)

IDS = st.binary(min_size=16, max_size=16)
NUMBERS = st.integers(0, 2**32 - 1)


@st.composite
def pages(draw: st.DrawFn) -> tuple[Header, list[bytes]]:
    """A header and the layers it describes."""
    size, count = draw(st.integers(0, 40)), draw(st.integers(0, 5))
    header = Header(
        id=draw(IDS),
        parent=draw(IDS),
        depth=draw(NUMBERS),
        layers=count,
        layer_bytes=size,
        group=draw(NUMBERS),
    )
    return header, [draw(st.binary(min_size=size, max_size=size)) for _ in range(count)]


@given(pages())
def test_what_is_written_is_read(page: tuple[Header, list[bytes]]) -> None:
    """Header and layers come back, whatever their bytes, and with checksums that were known before."""
    header, written = page
    value = encode(header, written)

    assert len(value) == header.total_bytes
    assert read_header(value, header.id) == header
    assert layers(value, header.id) == written
    assert check(value, header.id) == []
    assert value == encode(header, [memoryview(x) for x in written], [checksum(x) for x in written])


@given(pages(), st.data())
def test_a_flipped_bit_is_found(page: tuple[Header, list[bytes]], data: st.DataObject) -> None:
    """Any bit of the header makes it unreadable; any bit of a layer or its checksum tells on that layer alone."""
    header, written = page
    value = bytearray(encode(header, written))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    if bit < 8 * HEADER_BYTES:
        with pytest.raises(CorruptPage):
            check(value)
        return
    number = (bit // 8 - HEADER_BYTES) // (header.layer_bytes + SUM_BYTES)

    assert check(value, header.id) == [number]
    with pytest.raises(CorruptPage, match=f"layer {number} at byte"):
        layer(value, header, number)


@given(pages(), st.data())
def test_what_has_come_is_usable(page: tuple[Header, list[bytes]], data: st.DataObject) -> None:
    """Of a value that came in part, the layers that came whole are read; as a whole page it is refused."""
    header, written = page
    value = encode(header, written)
    part = value[: data.draw(st.integers(0, len(value) - 1))]
    with pytest.raises(CorruptPage):
        check(part)
    if len(part) < HEADER_BYTES:
        with pytest.raises(CorruptPage, match="expected a header of 64"):
            read_header(part)
        return
    assert read_header(part, header.id) == header
    came = (len(part) - HEADER_BYTES) // (header.layer_bytes + SUM_BYTES)
    assert [layer(part, header, number) for number in range(came)] == written[:came]
    with pytest.raises(CorruptPage, match=f"layer {came} of"):
        layer(part, header, came)


def test_another_page() -> None:
    """A page under another's name, one that is too long and one of another version are refused, with the reason."""
    header = Header(id=b"a" * 16, parent=b"b" * 16, depth=3, layers=1, layer_bytes=4)
    value = encode(header, [b"1234"])
    with pytest.raises(CorruptPage, match=f"id {b'a'.hex() * 16}; expected {b'c'.hex() * 16}"):
        layers(value, b"c" * 16)
    with pytest.raises(CorruptPage, match="page of 77 bytes: expected 76 by its header"):
        check(value + b"x")
    other = bytearray(value[: HEADER_BYTES - SUM_BYTES])
    other[4] = 9
    other += checksum(other).to_bytes(8, "little")
    with pytest.raises(CorruptPage, match="version 9; expected b'SWPG' version 1"):
        read_header(other)


def test_what_cannot_be_written() -> None:
    """Layers that are not as the header says are refused before anything is written."""
    header = Header(id=b"a" * 16, parent=b"b" * 16, depth=3, layers=2, layer_bytes=4)
    with pytest.raises(ValueError, match="1 layers; expected the header's 2"):
        encode(header, [b"1234"])
    with pytest.raises(ValueError, match="layer 1 has 3 bytes; expected 4"):
        encode(header, [b"1234", b"123"])
    with pytest.raises(ValueError, match="1 checksums; expected one for each of 2 layers"):
        encode(header, [b"1234", b"1234"], [1])
    wrong = Header(id=b"a", parent=b"b" * 16, depth=3, layers=0, layer_bytes=4)
    with pytest.raises(ValueError, match="expected 16 bytes each"):
        encode(wrong, [])
    deep = Header(id=b"a" * 16, parent=b"b" * 16, depth=2**32, layers=0, layer_bytes=4)
    with pytest.raises(ValueError, match="expected numbers from 0 to"):
        encode(deep, [])
