"""Exported documents are taken as they were given, and what is no session is refused with the place of the mistake."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SpillwayError
from common.wire.sessions import SessionRecord, Turn
from services.kv_store.sessions import session_documents

TEXTS = st.text(max_size=20)
SAID = st.builds(
    session_documents.MessageDocument,
    role=st.sampled_from(["system", "user", "assistant"]),
    content=TEXTS,
)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


COUNTS = st.integers(0, 2**31 - 1)
PASSAGES = st.builds(
    session_documents.PassageDocument,
    index=st.integers(1, 2**31 - 1),
    document_id=TEXTS,
    chunk=COUNTS,
    start=COUNTS,
    end=COUNTS,
    score=st.floats(-1, 1),
    text=st.none() | TEXTS,
)
RETRIEVALS = st.one_of(
    st.just(b""),
    st.builds(
        session_documents.RetrievalDocument,
        collection=TEXTS,
        found=COUNTS,
        passages=st.lists(PASSAGES, max_size=2),
    ).map(msgspec.json.encode),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns as a worker appends them."""
    turns, held = list[Turn](), 0
    for index in range(draw(st.integers(0, 4))):
        history = held if draw(st.booleans()) else 0
        shown = draw(st.one_of(st.none(), st.lists(SAID, min_size=1, max_size=2)))
        turn = Turn(
            job=f"job.turn.{index}",
            history=history,
            messages=msgspec.json.encode(draw(st.lists(SAID, min_size=1, max_size=3))),
            answer=draw(TEXTS),
            prompt=draw(IDS),
            output=draw(IDS),
            finish=draw(st.sampled_from(["stop", "length"])),
            at_ms=draw(st.integers(0, 2**43)),
            shown=msgspec.json.encode(shown) if shown else b"",
            partial=draw(st.booleans()),
            retrieval=draw(RETRIEVALS),
        )
        held = history + len(turn.prompt) + len(turn.output)
        turns.append(turn)
    return turns


def record(**more: Any) -> SessionRecord:
    """Return a session's record."""
    fields: dict[str, Any] = {
        "id": "chat.m~0~" + "0" * 26,
        "tenant": "t",
        "model": "m",
        "fingerprint": "f",
        "version": 0,
        "tokens": 0,
        "turns": 0,
        "ttl_s": 60,
        "created_ms": 1,
        "updated_ms": 2,
        "metadata": b'{"a":[1]}',
    }
    return SessionRecord(**(fields | more))


@given(turns=conversations())
def test_round_trip(turns: list[Turn]) -> None:
    """What is exported is imported as the very same turns, or, for another model, without their tokens."""
    body = msgspec.json.encode(
        session_documents.exported(
            record(), [session_documents.turn_document(turn) for turn in turns]
        )
    )
    found = session_documents.read(body)
    session_documents.check_tokens(found, 2**31)
    assert session_documents.imported(found, "job", tokens=True) == turns
    assert session_documents.keeps_tokens(found, "f")
    assert not session_documents.keeps_tokens(found, "g")
    for turn in session_documents.imported(found, "job", tokens=False):
        assert (turn.history, turn.prompt, turn.output) == (0, [], [])
    assert (found.model, found.metadata, found.ttl_s) == ("m", {"a": [1]}, 60)


GOOD: dict[str, Any] = {
    "format": "spillway.session/1",
    "model": "m",
    "turns": [
        {
            "messages": [{"role": "user", "content": "q"}],
            "answer": "a",
            "tokens": {"history": 0, "prompt": [1], "output": [2]},
        }
    ],
}


def turn(**changes: Any) -> dict[str, Any]:
    """Return the good document with a changed turn."""
    return GOOD | {"turns": [GOOD["turns"][0] | changes]}


@pytest.mark.parametrize(
    ("document", "where"),
    [
        ([], "object"),
        (GOOD | {"format": "spillway.session/2"}, "format"),
        ({k: v for k, v in GOOD.items() if k != "turns"}, "turns"),
        (GOOD | {"turn": []}, "turn"),
        (turn(messages=[]), "messages"),
        (turn(messages=[{"role": "tool", "content": "q"}]), "role"),
        (turn(messages=[{"role": "user", "content": [1]}]), "content"),
        (turn(messages=[{"role": "user", "content": "q", "name": "a b"}]), "name"),
        (turn(answer=None), "answer"),
        (turn(at=-1), "at"),
        (turn(tokens={"history": 0, "prompt": [-1], "output": []}), "prompt"),
        (turn(tokens={"history": 0, "prompt": [2**31], "output": []}), "prompt"),
        (turn(tokens={"history": 0, "prompt": [True], "output": []}), "prompt"),
        (turn(tokens={"history": 3, "prompt": [1], "output": []}), "turns[0].tokens.history"),
        (turn(tokens={"history": 0, "prompt": [500], "output": []}), "turns[0].tokens"),
        (GOOD | {"metadata": {"a": "x" * 70_000}}, "metadata"),
        (GOOD | {"ttl_s": 0}, "ttl_s"),
    ],
)
def test_bad_documents(document: Any, where: str) -> None:
    """Each mistake is a client's error that names its place."""
    with pytest.raises(SpillwayError) as refused:
        session_documents.check_tokens(session_documents.read(msgspec.json.encode(document)), 100)
    assert refused.value.http_status in {400, 413}
    assert where in refused.value.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 5000, b'{"format":"spillway.session/1","model":1}']
)
def test_bad_bytes(body: bytes) -> None:
    """Bytes that are no document are a client's error."""
    with pytest.raises(SpillwayError) as refused:
        session_documents.read(body)
    assert refused.value.code == "invalid_session"
