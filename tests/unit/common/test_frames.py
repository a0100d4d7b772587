"""Frames come out of a stream as they went in, however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.transport.frames import HEAD, MAX_PAYLOAD, BadFrame, FrameReader, frame

Frame = tuple[int, int, int, bytes]
FRAMES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=60),
    ),
    max_size=8,
)


@given(frames=FRAMES, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_frames_survive_any_cut(frames: list[Frame], cuts: list[int]) -> None:
    """The pieces in which bytes arrive do not matter."""
    stream = b"".join(
        frame(kind, call, payload, left_ms) for kind, call, left_ms, payload in frames
    )
    found: list[Frame] = []
    reader = FrameReader(lambda *each: found.append(each))
    at = turn = 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        reader.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == frames


@pytest.mark.parametrize("head", [HEAD.pack(MAX_PAYLOAD + 1, 1, 0, 1), HEAD.pack(0, 1, 0, 9)])
def test_what_is_no_frame_is_refused(head: bytes) -> None:
    """A length or a kind that no frame has ends the reading."""
    with pytest.raises(BadFrame):
        FrameReader(lambda *_: None).feed(head)


def test_a_payload_has_a_largest_size() -> None:
    """What would not be read is not written."""
    with pytest.raises(ValueError, match="at most"):
        frame(1, 1, bytes(MAX_PAYLOAD + 1))
