"""Retrieval while an answer is written, its pure part: queries, shifts, splices, schedules, time, and what is told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types.generation import SamplingParams
from common.wire.control import Applied, Extend
from common.wire.retrievals import RetrievalHistory, RetrievalNote, RetrievalRecord, retrieval_of
from common.wire.search import Hit
from common.wire.workflows import ChatRequest, GenerationOptions, RetrievalOptions
from services.router.text.grounded import grounded
from services.router.text.intervals import (
    INTERVALS,
    NO_CHANGE,
    WINDOW,
    Pace,
    RetrievalMargin,
    Schedule,
    budget_s,
    shifted,
    smallest_interval,
    splice,
    window,
)
from services.router.text.passages import Passage
from services.router.text.replacements import Replacement, numbered, replacement, window_query
from services.router.text.tokens import Spec
from services.vector_search.index.port import EffortPlan
from services.vector_search.search_cost import largest_fitting
from tests.support.scripted_generator import byte_tokenizer, card, written

TOKENS = st.lists(st.integers(0, 5), max_size=12)


# -- tokens ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(), max_size=100), st.lists(st.integers(), max_size=100), st.data())
def test_a_query_is_the_last_tokens_of_question_and_answer(
    question: list[int], answer: list[int], data: st.DataObject
) -> None:
    """As many as a window has, as of any token of the answer, and none of those after it."""
    at = data.draw(st.integers(0, len(answer)))

    assert window(question, answer, at) == [*question, *answer[:at]][-WINDOW:]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 70))
def test_a_shifted_neighbour_goes_on_where_its_query_has_got_to(
    length: int, following: int, shift: int
) -> None:
    """Its first tokens are gone and as many follow, as far as its document reaches; one that is all gone is none."""
    spans = [(3 * at, 3 * at + 2) for at in range(length + following)]
    found = shifted(spans, length, shift)
    kept = list(range(length + following))[shift : shift + length]

    assert found == ((3 * kept[0], 3 * kept[-1] + 2) if kept else None)
    if found is not None and shift <= following:
        assert len(kept) == length


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_a_splice_is_the_smallest_change_of_a_prompt(
    before: list[int], one: list[int], other: list[int], after: list[int]
) -> None:
    """It makes the new prompt of the old one, touches no token that both have in its place, and is never no change."""
    old, new = [*before, *one, *after], [*before, *other, *after]
    change = splice(old, new)
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1

    assert change.applied(old) == new
    assert change.start == same or old == new
    assert max(change.removed, len(change.tokens)) <= max(len(one), len(other), 1)
    assert (change == NO_CHANGE) == (not old and not new)


@given(st.sampled_from(INTERVALS), st.integers(1, 300), st.booleans(), st.integers(0, 299))
def test_a_schedule(interval: int, max_new: int, stale: bool, tokens: int) -> None:
    """Every boundary lies before the last token; a stale query is an interval old, another one is of all tokens."""
    schedule = Schedule.of(interval, max_new, stale=stale)
    boundaries = [schedule.boundary(number) for number in range(1, schedule.most + 1)]

    assert boundaries == list(range(interval, max_new, interval))
    for number, boundary in enumerate(boundaries, 1):
        assert schedule.asked(number) == boundary - (interval if stale else 0)
    if stale:
        number = schedule.current(tokens)
        assert schedule.asked(number) <= tokens < schedule.boundary(number)


# -- time ------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(INTERVALS),
    st.floats(1e-4, 1.0),
    st.lists(st.floats(0, 100), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_the_pace_is_that_of_tokens_within_a_chunk(
    interval: int, token_s: float, pauses: Sequence[float], together: int
) -> None:
    """Whatever a generation waits at its boundaries, and however many tokens come at once."""
    pace, now_s, tokens = Pace(interval, 9.0), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        for at in range(1, interval + 1):
            now_s += token_s
            if at % together == 0 or at == interval:
                pace.note(tokens + at, now_s)
        tokens += interval

    assert pace.interval_s == pytest.approx(interval * token_s, rel=1e-6)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_budgets_fall_with_the_margin(interval_s: float, one: float, other: float) -> None:
    """No budget is negative or longer than the interval; a larger margin leaves no more."""
    few, many = sorted((one, other))

    assert 0 <= budget_s(interval_s, many) <= budget_s(interval_s, few) <= interval_s


@given(st.floats(0, 10), st.floats(1e-6, 1.0))
def test_the_smallest_interval_holds_a_retrieval(retrieval_s: float, token_s: float) -> None:
    """The smallest of all that do, else the largest there is."""
    fits = [each for each in INTERVALS if each * token_s >= retrieval_s]

    assert smallest_interval(retrieval_s, token_s) == min([*fits, INTERVALS[-1]])


@pytest.mark.parametrize("seed", range(5))
def test_few_retrievals_are_late_once_the_margin_is_known(seed: int) -> None:
    """A search that takes its whole budget and an overhead that nobody told it of: one in twenty, give or take."""
    rng, margin, late = random.Random(seed), RetrievalMargin(), []
    for number in range(2400):
        interval_s = rng.uniform(0.2, 0.8)
        predicted_s = budget_s(interval_s, margin.value_s)
        took_s = predicted_s * rng.uniform(0.8, 1.0) + rng.expovariate(50)
        margin.learn(took_s, predicted_s)
        if number >= 400:
            late.append(took_s > interval_s)

    assert sum(late) / len(late) <= 0.06


# Milliseconds of a token by 128 tokens of context, and the line of milliseconds by nprobe (tables 5.4 and 5.3).
_TOKEN_MS = (7.24, 7.29, 7.71, 8.34, 9.31, 10.47, 11.84, 13.19)
_NPROBES = {
    64: [22, 22, 23, 26, 29, 32, 37, 41],
    32: [10, 10, 11, 12, 14, 15, 18, 20],
    16: [4, 4, 5, 5, 6, 7, 8, 9],
    8: [2, 2, 2, 2, 2, 3, 3, 4],
}


@pytest.mark.parametrize("interval", INTERVALS)
def test_searches_take_more_effort_as_an_answer_grows(interval: int) -> None:
    """The largest nprobe whose predicted time fits the interval, for the thesis' costs: it rises with the context."""
    plans = [EffortPlan("ivfpq", effort, (float(effort),)) for effort in range(1, 129)]
    chosen = [
        largest_fitting(
            plans,
            lambda plan: 0.01821 + 0.019817 * plan.factors[0],
            budget_s(interval * token_ms / 1000, 0.0),
        ).plan.effort
        for token_ms in _TOKEN_MS
    ]

    assert chosen == _NPROBES[interval]


# -- passages --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    """The scripted model, whose tokens are bytes."""
    path = tmp_path_factory.mktemp("spec") / "tokenizer.json"
    path.write_text(byte_tokenizer().to_str())
    return Spec(**msgspec.structs.asdict(card()), path=str(path))


def asked(question: str = "Who?", **retrieval: object) -> ChatRequest:
    options = GenerationOptions(SamplingParams(), max_new=40)
    given = RetrievalOptions("docs", interval=8, **retrieval)  # type: ignore[arg-type]
    message = {"role": "user", "content": question}
    return ChatRequest("scripted", "t", [message], options, retrieval=given)


def hit(name: str, text: str, following: str | None = None, start: int = 0) -> Hit:
    return Hit(name, 0.5, 0, start, start + len(text), text, following=following)


@pytest.mark.parametrize("place", ["before", "after"])
def test_replaced_passages_are_the_prompt_that_a_new_chat_would_have(
    spec: Spec, place: str
) -> None:
    """The admitted prompt with the change is that of a chat with the new passages; numbers and places are theirs."""
    ask = asked(place=place)
    first = grounded(ask, spec, None, [[hit("a", "Alpha is one."), hit("b", "Beta is two.")]])
    assert first.slot is not None
    hits = [hit("c", "0123456789", "abcdefghij", start=50), hit("b", "Beta is two.")]
    made = replacement(ask, spec, None, first.slot, hits, 0, first.slot.passages, 3)
    moved = replacement(ask, spec, None, first.slot, hits, 8, first.slot.passages, 3)
    again = [
        Hit(p.document_id, p.score, p.chunk, p.start, p.end, p.text)  # as found by the new chat
        for p in made.passages
    ]
    other = grounded(ask, spec, None, [again])
    assert other.slot is not None
    text = byte_tokenizer().decode(made.splice.applied(first.slot.prompt))

    assert made.kept is None
    assert [(p.index, p.document_id, p.start, p.end) for p in made.passages] == [
        (3, "c", 50, 60),
        (2, "b", 0, 12),
    ]
    assert "[3] 0123456789" in text
    assert "[2] Beta is two." in text
    assert "Alpha" not in text
    assert (text.index("Question: Who?") < text.index("[3] ")) == (place == "after")
    assert [(p.start, p.end, p.text) for p in moved.passages] == [
        (58, 68, "89abcdefgh"),
        (8, 12, "two."),  # its document ends there
    ]


def test_what_is_not_found_or_does_not_fit_leaves_the_passages(spec: Spec) -> None:
    """Nothing found, nothing that the model reads, no room for a sentence; and a short neighbour stays as it is."""
    ask = asked()
    first = grounded(ask, spec, None, [[hit("a", "Alpha is one.")]])
    slot = first.slot
    assert slot is not None

    def put(spec: Spec, text: str, room: int = slot.room, shift: int = 0) -> Replacement:
        hits = [hit("b", text)] if text else []
        return replacement(ask, spec, None, slot._replace(room=room), hits, shift, slot.passages, 2)

    letters = msgspec.structs.replace(spec, reads=2.0)
    assert put(spec, "") == Replacement([], kept="nothing_found")
    assert put(letters, "Beta is two.").kept == "unreadable"
    assert put(spec, "Beta is two.", room=100).kept == "no_room"
    assert put(spec, "Short.", shift=64).passages[0].text == "Short."
    cut = put(spec, "Beta is two. " * 90, room=len(slot.prompt) + 40)
    assert len(cut.splice.applied(slot.prompt)) <= len(slot.prompt) + 40
    assert cut.passages[0].text.endswith("two.")


def test_queries_are_texts_of_the_latest_tokens(spec: Spec) -> None:
    """The end of the question goes before an answer that has just begun; a letter that was cut is left out."""
    encoder = msgspec.structs.replace(spec, max_tokens=200)
    begun = window_query(asked("x" * 70 + " Who?"), spec, encoder, "query: ", written("It is é"))
    grown = window_query(asked(), spec, encoder, "", written("é" + "y" * (WINDOW - 1)))

    assert begun.text == "x" * (WINDOW - 8 - 5) + " Who?It is é"
    assert (begun.window, begun.tokens) == (WINDOW, written("query: " + begun.text))
    assert grown.text == "y" * (WINDOW - 1)


@given(
    st.lists(st.integers(0, 9), max_size=12, unique=True), st.lists(st.integers(0, 9), max_size=12)
)
def test_a_passage_has_one_number(known: list[int], found: list[int]) -> None:
    """What was in the prompt before keeps its number; the rest is numbered without gaps, none twice."""
    before = [
        Passage(n + 1, f"d{place}", 0, place, place + 1, 0.5) for n, place in enumerate(known)
    ]
    made = numbered([Passage(0, f"d{p}", 0, p, p + 1, 0.5) for p in found], before, 100)
    numbers = {passage.document_id: passage.index for passage in (*before, *made)}
    fresh = list(dict.fromkeys(p.index for p in made if p.index >= 100))

    assert [numbers[f"d{place}"] for place in found] == [passage.index for passage in made]
    assert fresh == list(range(100, 100 + len(set(found) - set(known))))


# -- what is told ----------------------------------------------------------------------------------------

FIRST = {
    "collection": "docs",
    "found": 2,
    "passages": [{"index": 1}, {"index": 2}],
    "retrievals": [msgspec.to_builtins(RetrievalRecord(0, 0, 2, [1, 2], replaced=[], late=False))],
}


def applied(number: int, tokens: int, passages: Sequence[int], kept: str | None = None) -> Applied:
    record = RetrievalRecord(8 * number, 8 * number - 8, 1, [], [], late=False, kept=kept)
    note = RetrievalNote(8 * number, [{"index": index} for index in passages], record)
    tokens_of = [] if kept else [number]
    extension = Extend(
        number=number, removed=len(tokens_of), tokens=tokens_of, note=msgspec.json.encode(note)
    )
    return Applied(tokens, extension)


def test_a_history_of_retrievals() -> None:
    """What replaced what, and where; late ones by where they count; each once, whoever reads the log again."""
    every = [
        applied(1, 8, [2, 3]),
        applied(2, 16, [2, 3], kept="nothing_found"),
        applied(4, 40, [5, 3]),
        Applied(48, Extend(number=5)),  # refused by the worker
    ]
    history = RetrievalHistory(FIRST)
    told = [history.take(each) for each in (*every[:2], *every)]
    records = history.shown["retrievals"]

    assert [(r["at_token"], r["passages"], r["replaced"], r["late"]) for r in records] == [
        (0, [1, 2], [], False),
        (8, [2, 3], [1], False),
        (16, [2, 3], [], False),
        (40, [5, 3], [2], True),
    ]
    assert [row["index"] for row in history.shown["passages"]] == [1, 2, 3, 5]
    assert history.in_force == [5, 3]
    assert [one and [row["index"] for row in one["passages"]] for one in told] == [
        [3],
        [],
        None,
        None,
        [5],
        None,
    ]
    assert [one["retrievals"] for one in told if one] == [[record] for record in records[1:]]
    assert msgspec.json.decode(retrieval_of(msgspec.json.encode(FIRST), every)) == history.shown
    assert retrieval_of(b"", every) == b""


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(1, 9), unique=True, max_size=4))))
def test_records_replay_to_the_passages_in_force(steps: list[tuple[int, list[int]]]) -> None:
    """Taking away what was replaced and adding what is new always gives what a record says is in the prompt."""
    history, numbers = RetrievalHistory(FIRST), itertools.accumulate(step for step, _ in steps)
    for number, (_, passages) in zip(numbers, steps, strict=True):
        before = set(history.in_force)
        told = history.take(applied(number, 8 * number, passages))
        assert told is not None
        [record] = told["retrievals"]
        assert set(record["passages"]) == before - set(record["replaced"]) | set(passages)
        assert set(passages) <= {row["index"] for row in history.shown["passages"]}
