"""A client that loses its connection any number of times sees the undisturbed stream: no chunk lost, none twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import ulid
from common.types.generation import Logprob
from common.wire.control import Applied, Extend
from common.wire.message import encode
from common.wire.results import Delta, Event, GenerateResult, Piece
from common.wire.retrievals import RetrievalHistory, RetrievalNote, RetrievalRecord
from common.wire.workflows import AnswerMarks, ResponseOptions
from services.router.responses.answer_format import AnswerFormat
from services.router.responses.answer_sources import follow
from tests.support.chat import frames_of

REQUEST = f"chat.m~0~{ulid(1_700_000_000_123)}"
CALL = ('<tool_call>{"name": "f", ', '"arguments": {}}</tool_call>')
TEXTS = ("", "a", "é🙂", "\n\n", "data: x", "<think>", "</think>", *CALL, "".join(CALL))
MARKS = AnswerMarks("hermes", ["f"], "marked")
RESULT = GenerateResult(prompt_tokens=3, completion_tokens=9)


class Log:
    """One job's log at some moment, as `Journal.events` reads it: folded up to `folded`, and `seen` events long."""

    def __init__(self, events: list[list[Piece]], extended: Sequence[int] = ()) -> None:
        """`extended` are tokens after which the prompt was extended; the log says so in the event after them."""
        self.events_of = events
        self._extended = extended
        self.folded = -1
        self.seen = 0

    async def events(
        self, job: str, start: int, deadline_ms: int, bell: Any = None, *, look_s: float
    ) -> AsyncGenerator[Event, None]:
        assert (job, start) == (REQUEST, 0)
        for index in range(max(self.folded, 0), self.seen):
            first = 0 if index == self.folded else index
            pieces = [p for event in self.events_of[first : index + 1] for p in event]
            applied = [each for at in range(first, index + 1) for each in self._applied(at)]
            delta = Delta(pieces=pieces, applied=applied)
            yield Event(index=index, kind="progress", data=encode(delta))
        if self.seen == len(self.events_of):
            yield Event(index=self.seen, kind="result", data=encode(RESULT))

    def _applied(self, at: int) -> list[Applied]:
        """Return the extensions that take effect before the last token of event `at`, and in no event before."""
        tokens = [sum(len(p.tokens) for e in self.events_of[:n] for p in e) for n in (at, at + 1)]
        first, last = tokens
        return [
            applied(number, each)
            for number, each in enumerate(sorted(self._extended), 1)
            if first <= each < last
        ]


def passage(index: int) -> dict[str, Any]:
    return {"index": index, "document_id": "d", "chunk": 0, "start": 0, "end": 1, "score": 0.5}


def applied(number: int, tokens: int) -> Applied:
    """Return an extension whose note says that passage `number` takes the place of the one before."""
    record = RetrievalRecord(tokens, 0, 1, [], [], late=False)
    note = msgspec.json.encode(RetrievalNote(tokens, [passage(number + 1)], record))
    return Applied(tokens, Extend(number=number, removed=1, tokens=[number], note=note))


@st.composite
def generations(draw: st.DrawFn) -> tuple[int, list[list[Piece]]]:
    """Return a number of choices and a job's events: pieces of any choices, held-back text included."""
    choices = draw(st.integers(1, 3))
    events: list[list[Piece]] = []
    for at in range(draw(st.integers(1, 8))):
        who = sorted(draw(st.sets(st.integers(0, choices - 1), min_size=1)))
        texts = [draw(st.sampled_from(TEXTS)) for _ in who]
        logprob = Logprob(id=1, raw=b"a", logprob=-1.0)
        events.append(
            [
                Piece(at=at, choice=choice, tokens=[at], text=text, logprobs=[logprob])
                for choice, text in zip(who, texts, strict=True)
            ]
        )
    last = [Piece(at=len(events), choice=c, text="end", finish="stop") for c in range(choices)]
    return choices, [*events, last]


async def read(
    log: Log, view: ResponseOptions, after: tuple[int, int] | None, most: int
) -> list[bytes]:
    """Return up to `most` frames of a connection that goes on after a piece."""
    rests = RetrievalHistory({"collection": "c", "found": 1, "passages": [passage(1)]})
    shape = AnswerFormat(REQUEST, view, rests if view.kind == "chat" else None)
    found = list[bytes]()
    extensions: list[bytes] = []
    if after is None:
        found += shape.heads()
    pieces = follow(log, REQUEST, 0)  # type: ignore[arg-type]
    async for item in pieces:
        if isinstance(item, Event):
            if item.kind == "result":
                found += extensions
                found += [shape.usage_chunk(RESULT), b"data: [DONE]\n\n"]
            break
        if isinstance(item, Applied):
            told = shape.extended(item)
            assert told is not None
            extensions.append(told)
            continue
        chunk = shape.chunk(item)
        if (item.at, item.choice) > (after or (-1, -1)):
            found += [*extensions, *([chunk] if chunk is not None else [])]
        extensions.clear()
    await pieces.aclose()
    return found[:most]


@settings(max_examples=200)
@given(
    made=generations(),
    kind=st.sampled_from(["chat", "completion"]),
    logprobs=st.sampled_from([-1, 0]),
    marks=st.sampled_from([None, MARKS]),
    cuts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 12)), max_size=8),
    extended=st.sets(st.integers(0, 9), max_size=4),
)
def test_disconnects_change_nothing(
    made: tuple[int, list[list[Piece]]],
    kind: str,
    logprobs: int,
    marks: AnswerMarks | None,
    cuts: list[tuple[int, int, int]],
    extended: set[int],
) -> None:
    """Over any splits, folds and breaks, what a client has in the end is the undisturbed stream.

    Where passages were replaced in it, that is told before the token that followed.
    """
    choices, events = made
    view = ResponseOptions(
        kind=kind, model="m", choices=choices, include_usage=True, logprobs=logprobs, marks=marks
    )
    log = Log(events, sorted(extended) if choices == 1 and kind == "chat" else ())
    log.seen = len(events)
    whole = asyncio.run(read(log, view, None, 1000))
    log.seen, got, after = 0, list[bytes](), None
    for seen, folded, most in [*cuts, (len(events), len(events) - 1, 1000)]:
        log.seen = max(log.seen, min(seen, len(events)))
        log.folded = max(log.folded, min(folded, log.seen - 1))
        for frame in asyncio.run(read(log, view, after, most)):
            name = frames_of(frame)[0][0]
            if name:
                at, _, choice = name.partition(".")
                after = (int(at), int(choice))
            got.append(frame)
        if got and got[-1] == whole[-1]:
            break
        while got and not got[-1].startswith(b"id:"):  # what has no id comes again
            got.pop()
    assert got == whole


@given(made=generations(), logprobs=st.sampled_from([-1, 0]))
def test_an_answer_is_what_its_stream_said(
    made: tuple[int, list[list[Piece]]], logprobs: int
) -> None:
    """The whole answer's texts, ends and logprobs are the chunks' put together."""
    choices, events = made
    view = ResponseOptions(kind="chat", model="m", choices=choices, logprobs=logprobs)
    streamed, whole = AnswerFormat(REQUEST, view), AnswerFormat(REQUEST, view)
    frames = []
    for piece in (piece for event in events for piece in event):
        whole.take(piece)
        frames.append(streamed.chunk(piece))
    body = msgspec.json.decode(whole.whole(RESULT))
    chunks = [data["choices"][0] for frame in frames if frame for _, data in frames_of(frame)]

    assert body["created"] == 1_700_000_000
    for choice in body["choices"]:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert choice["message"]["content"] == "".join(c["delta"].get("content", "") for c in mine)
        assert choice["finish_reason"] == mine[-1]["finish_reason"] == "stop"
        if logprobs >= 0:
            parts = [one for chunk in mine for one in chunk["logprobs"]["content"]]
            assert choice["logprobs"]["content"] == parts
