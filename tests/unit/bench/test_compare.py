"""Equality with the undisturbed run: a difference is found at its token, and allowed only where there was no choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.clients import Done
from chaos.compare import CLOSE, Comparison, Known, difference, known_of
from loadgen.chat.answer import StreamedAnswer
from loadgen.chat.frames import Frame

KNOWN = Known(
    "Thé end", "length", 3, greedy=True, tokens=(b"Th", "é".encode(), b" end"),
    gaps=(1.0, 1e-4, 0.5),
)  # fmt: skip


def _answer(text: str, **given: object) -> StreamedAnswer:
    found = StreamedAnswer(
        status=200, texts={0: text}, finish={0: "length"}, output_tokens=3, done=True
    )
    for name, value in given.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("text", "at", "gap", "allowed"),
    [
        ("Thé End", 5, 0.5, False),
        ("The end", 2, 1e-4, True),
        ("Th\u00e8 end", 3, 1e-4, True),
        ("xThé end", 0, 1.0, False),
        ("Thé", 4, 0.5, False),
        ("Thé end.", 8, float("inf"), False),
    ],
)
def test_the_first_difference_is_found(text: str, at: int, gap: float, allowed: bool) -> None:
    """Byte, gap of the known token that holds it, and whether equality by contract allows it."""
    found = difference("k", KNOWN, text)

    assert found is not None
    assert (found.at, found.gap, found.allowed) == (at, gap, allowed)


@given(
    tokens=st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=8),
    text=st.text(max_size=12),
    gaps=st.lists(st.floats(0, 2), min_size=8, max_size=8),
    greedy=st.booleans(),
)
def test_only_close_greedy_tokens_may_differ(
    tokens: list[str], text: str, gaps: list[float], greedy: bool
) -> None:
    """Equal text is never a difference; another one is, and drawn answers may never differ."""
    encoded = tuple(token.encode("utf-8", "surrogatepass") for token in tokens)
    known_text = "".join(tokens)
    if any(0xD800 <= ord(c) < 0xE000 for c in known_text + text):
        return
    known = Known(known_text, "stop", len(tokens), greedy, encoded, tuple(gaps[: len(tokens)]))
    found = difference("k", known, text)

    assert (found is None) == (text == known_text)
    if found is not None:
        assert found.allowed == (greedy and found.gap < CLOSE)
        assert known_text.encode()[: found.at] == text.encode()[: found.at]


def test_a_comparison_counts_and_judges() -> None:
    """Errors, broken streams, other ends and other counts are told; an allowed difference is kept and ok."""
    found = Comparison()

    assert found.judge("a", KNOWN, _answer("Thé end")) == "ok"
    assert found.judge("b", KNOWN, _answer("The end")) == "ok"
    assert "another answer" in found.judge("c", KNOWN, _answer("Thé End"))
    assert "finish_reason stop" in found.judge("d", KNOWN, _answer("Thé end", finish={0: "stop"}))
    assert "4 completion tokens" in found.judge("e", KNOWN, _answer("Thé end", output_tokens=4))
    assert found.judge("f", KNOWN, _answer("Thé end", code="cut", message="m")) == "cut: m"
    assert found.judge("g", KNOWN, _answer("Thé end", wrong=["doubled"])) == "doubled"
    assert found.sequences == 5
    assert [each.key for each in found.differences] == ["b", "c"]


def test_what_is_known_comes_from_log_probabilities() -> None:
    """Each token's bytes and the gap of its two likeliest alternatives, passages and citations as sent."""
    answer = _answer("hi")
    answer.logprobs = [
        {"bytes": [104, 105], "top_logprobs": [{"logprob": -1.5}, {"logprob": -0.5}]},
        {"bytes": None, "top_logprobs": [{"logprob": -0.1}]},
    ]
    answer.retrieval = {"passages": [{"document_id": "d", "start": 0, "end": 9, "index": 1}]}
    answer.citations = [{"index": 1, "document_id": "d"}]
    known = known_of(answer, greedy=True)

    assert known.tokens == (b"hi", b"")
    assert known.gaps == (1.0, float("inf"))
    assert (known.passages, known.citations) == ((("d", 0, 9),), ((1, "d"),))
    other = _answer("hi", retrieval={"passages": []})
    assert "passages ()" in Comparison().judge("k", known, other)


def test_chunks_that_promise_nothing_are_wrong() -> None:
    """Text without an event id, pieces out of order, pieces after the finish, an end without one."""

    def chunk(text: str, finish: str = "null") -> bytes:
        return b'{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":%s}]}' % (
            text.encode(), finish.encode(),
        )  # fmt: skip

    answer = StreamedAnswer()
    answer.take(Frame(chunk("a")), 0.0)
    answer.take(Frame(chunk("b"), "3.0"), 0.0)
    answer.take(Frame(chunk("c", '"stop"'), "2.0"), 0.0)
    answer.take(Frame(chunk("d"), "4.0"), 0.0)
    assert [line.split(" ")[0] for line in answer.wrong] == ["text", "piece", "piece"]
    unfinished = StreamedAnswer()
    unfinished.take(Frame(b"[DONE]"), 0.0)
    unfinished.take(Frame(b"not json"), 0.0)
    assert len(unfinished.wrong) == 2
    failed = StreamedAnswer()
    failed.take(Frame(b'{"error":{"code":"worker_lost","message":"m"}}'), 0.0)
    assert (failed.code, failed.ok) == ("worker_lost", False)


def test_silence_is_the_longest_pause_after_a_kill() -> None:
    """Without parts it lasts until the answer; with parts it is the longest pause, the last included."""
    assert Done("k", "k", 0.0, 9.0).silence_s(2.0) == 7.0
    assert Done("k", "k", 5.0, 9.0).silence_s(2.0) == 4.0
    assert Done("k", "k", 0.0, 9.0, beats_s=[1.0, 3.0, 8.0, 8.5]).silence_s(2.0) == 5.0
    assert Done("k", "k", 0.0, 9.0, beats_s=[2.5, 3.0]).silence_s(2.0) == 6.0
    assert Done("k", "k", 0.0, 9.0, answered_s=4.0).silence_s(1.0) == 3.0
    assert Done("k", "k", 0.0, 9.0, answered_s=4.0).silence_s(5.0) == 0.0
