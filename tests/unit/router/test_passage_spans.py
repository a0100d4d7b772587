"""Where passages lie in a prompt: their texts, whatever templates, tokenizers and questions do; or a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.types.generation import SamplingParams
from common.wire.control import span_problem
from common.wire.jobs import GenerateWork, decode_work
from common.wire.search import Hit
from common.wire.workflows import ChatRequest, GenerationOptions, RetrievalOptions
from services.router.text.chats import SessionHistory, chat_prompt
from services.router.text.generations import GenerationSpec
from services.router.text.grounded import grounded, grounded_messages, spans_of
from services.router.text.passages import Passage
from services.router.text.replacements import replacement
from services.router.text.tokens import Spec, load
from tests.support import small_tokenizers
from tests.support.scripted_generator import byte_tokenizer, card
from tests.unit.router.test_templates import LLAMA, QWEN

TEXTS = st.lists(
    st.sampled_from(
        [
            "One is one. ",
            "two\n",
            "  ",
            "Who?",
            "Grüße ",
            "\ue000",
            "\uf100",
            "<|im_end|>",
            "[1] ",
            "日本",
        ]
    ),
    min_size=1,
    max_size=5,
).map("".join)
ANY = st.text(max_size=20)
_SPECS: dict[str, Spec] = {}  # by template


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Spec]:
    """Make the spec of a model by its tokenizer and its templates."""

    def made(tokenizer: bytes | None = None, **changes: object) -> Spec:
        path = tmp_path_factory.mktemp("spec") / "tokenizer.json"
        path.write_bytes(tokenizer or byte_tokenizer().to_str().encode())
        facts = msgspec.structs.asdict(msgspec.structs.replace(card(), **changes))
        return Spec(**facts, path=str(path))

    return made


def asked(question: str = "Who?", **retrieval: object) -> ChatRequest:
    options = GenerationOptions(SamplingParams(), max_new=40)
    given = RetrievalOptions("docs", **{"precomputed": True, **retrieval})  # type: ignore[arg-type]
    message = {"role": "user", "content": question}
    return ChatRequest("scripted", "t", [message], options, retrieval=given)


def passages(texts: Sequence[str]) -> list[Passage]:
    return [Passage(n, f"d{n}", 0, 0, len(text), 0.5, text) for n, text in enumerate(texts, 1)]


def work_of(made: GenerationSpec) -> GenerateWork:
    work = decode_work(made.parcel.payload)
    assert isinstance(work, GenerateWork)
    return work


@given(
    texts=st.lists(TEXTS | ANY, max_size=4),
    question=TEXTS | ANY.map("Who? ".__add__),
    place=st.sampled_from(["before", "after"]),
    template=st.sampled_from(["", LLAMA, QWEN]),
)
def test_spans_hold_the_texts_of_passages(
    spec_of: Callable[..., Spec], texts: list[str], question: str, place: str, template: str
) -> None:
    """With a token a byte a span is exactly a passage's text without space at its ends, even if the question has it.

    Spans are those of the prompt that is made without looking for them.
    """
    if template not in _SPECS:
        _SPECS[template] = spec_of(chat_template=template) if template else spec_of()
    spec = _SPECS[template]
    ask, some = asked(question, place=place), passages(texts)
    spans = spans_of(ask, spec, None, some)
    tokens, _ = chat_prompt(spec, grounded_messages(ask, spec, some))

    assert span_problem(spans, len(tokens)) == ""
    encoder = load(spec.path)
    cores = [text.strip() for text in texts]
    said = [encoder.decode(tokens[begin:end]) for begin, end in spans]
    assert said == [core for core in cores if encoder.written(core)]


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_tokens_on_the_edge_belong_to_the_passage(spec_of: Callable[..., Spec], kind: str) -> None:
    """Whatever the tokenizer, a span's text holds the passage's, and no other span has a token of it."""
    spec = spec_of(getattr(small_tokenizers, kind)(), bos="", eos="", stop_ids=[])
    ask, some = asked(), passages(["the lazy dog é", "a b c. a", "naïve"])
    spans = spans_of(ask, spec, None, some)
    tokens, _ = chat_prompt(spec, grounded_messages(ask, spec, some))
    assert span_problem(spans, len(tokens)) == ""
    assert len(spans) == 3
    if kind == "byte_level":
        said = [load(spec.path).decode(tokens[begin:end]) for begin, end in spans]
        assert all(each.text in text for each, text in zip(some, said, strict=True))


def test_a_history_moves_the_spans(spec_of: Callable[..., Spec]) -> None:
    """In a session the places count the history's tokens, and none lies in it."""
    spec = spec_of()
    before = [{"role": "user", "content": "Alpha is one."}]
    said = load(spec.path).written("Yes.")
    first, _ = chat_prompt(spec, before)
    history = SessionHistory(
        "s", 1, "scripted", 60, [(msgspec.json.encode(before), "Yes.")], [*first, *said]
    )
    ask, some = asked(), passages(["Alpha is one.", "Beta is two."])
    spans = spans_of(ask, spec, history, some)
    tokens, held = chat_prompt(spec, grounded_messages(ask, spec, some), history)

    assert held == len(first) + len(said)
    assert spans[0][0] > held
    assert [load(spec.path).decode(tokens[a:b]) for a, b in spans] == [each.text for each in some]


def test_templates_that_change_passages_are_refused(spec_of: Callable[..., Spec]) -> None:
    """Where passages lie cannot be told if a template writes them twice, or in other letters, or not at all."""
    body = "{% for p in passages %}PASSAGE{% endfor %}{{ question }}"
    for shown in (
        "{{ p.text | upper }}{{ p.text }}",
        "{{ p.text | length }}",
        "",
        "{{ p.text[1:] }}",
    ):
        spec = spec_of(grounding_template=body.replace("PASSAGE", shown))
        with pytest.raises(
            InvalidRequest, match=r"retrieval.precomputed: where passages lie"
        ) as told:
            spans_of(asked(), spec, None, passages(["Alpha is one."]))
        assert (told.value.code, told.value.param) == ("unsupported", "retrieval.precomputed")
    spec = spec_of(grounding_template=body.replace("PASSAGE", "{{ p.text }}"))
    assert spans_of(asked(), spec, None, passages(["Alpha is one."])) != []


def test_jobs_and_replacements_carry_them(spec_of: Callable[..., Spec]) -> None:
    """The job of a chat that asks for it has spans and says so; a replacement's are those of the prompt it makes."""
    spec = spec_of()
    hits = [Hit("a", 0.5, 0, 0, 13, "Alpha is one."), Hit("b", 0.4, 0, 0, 12, "Beta is two.")]
    ask = asked(interval=8)
    made = grounded(ask, spec, None, [hits])
    work = work_of(made.generation)
    assert made.retrieval["approximate"] is True
    assert [byte_tokenizer().decode(work.prompts[0][a:b]) for a, b in work.spans] == [
        each.text for each in hits
    ]

    assert made.slot is not None
    other = [Hit("c", 0.5, 0, 0, 14, "Gamma is three"), hits[0]]
    changed = replacement(ask, spec, None, made.slot, other, 0, made.slot.passages, 3)
    prompt = changed.splice.applied(work.prompts[0])
    assert [byte_tokenizer().decode(prompt[a:b]) for a, b in changed.spans] == [
        each.text for each in other
    ]

    exact = grounded(asked(precomputed=False, interval=8), spec, None, [hits])
    plain = work_of(exact.generation)
    assert "approximate" not in exact.retrieval
    assert (plain.spans, plain.prompts) == ([], work.prompts)
    assert exact.generation.marks[: len(made.generation.marks)] == made.generation.marks
    nothing = grounded(ask, spec, None, [[]])
    assert "approximate" not in nothing.retrieval
    assert work_of(nothing.generation).spans == []


@given(
    st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), max_size=4), st.integers(0, 12)
)
def test_wrong_spans_are_told(spans: list[tuple[int, int]], length: int) -> None:
    """Spans are right only if they rise, hold a token each, and leave out the first and the last token."""
    places = [at for begin, end in spans for at in range(begin, end)]
    right = (
        all(begin < end for begin, end in spans)
        and places == sorted(set(places))
        and all(0 < at < length - 1 for at in places)
    )
    assert (span_problem(spans, length) == "") == right
