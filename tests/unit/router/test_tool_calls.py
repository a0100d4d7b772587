"""Calls and reasoning in answers: outputs of the four formats, cut anywhere, whole and broken; their grammars."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidRequest
from common.types.grammar import definition, fault
from common.wire.workflows import ToolFormat
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sampling.grammar import GrammarCompiler
from services.router.responses.tool_calls import ReasoningSplitter, ToolCall, ToolCallParser
from services.router.text.tokens import TextEncoder
from services.router.text.tools import FunctionBody, ToolBody, ToolWish, bound, format_of, wish_of
from tests.support.scripted_generator import byte_tokenizer
from tests.support.tool_templates import TEMPLATES, TOKENS

NAMES = ("get_weather", "search")
PARIS = ToolCall("get_weather", '{"city": "Paris"}')
OSLO = ToolCall("get_weather", '{"city": "Oslo", "days": 2}')
CODE = ToolCall(
    "search",
    '{"query": "a } ] </tool_call> \\" \\\\ [TOOL_CALLS] ;", "deep": {"x": [1, {"y": null}]}}',
)
# What models of the four formats wrote, or might: the text, the content and the calls that are read from it.
Recorded = tuple[ToolFormat, str, str, list[ToolCall]]
GET, IN = '{"name": "get_weather", ', '{"city": "Paris"}'
TO_PARIS = f'{GET}"arguments": {IN}}}'
TO_OSLO = f'{GET}"arguments": {OSLO.arguments}}}'
OUTPUTS: list[Recorded] = [
    # Hermes 2 Pro, Qwen 2.5, Qwen 3
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>\n', "", [PARIS]),
    ("hermes", f"I will look.\n<tool_call>\n{TO_PARIS}\n</tool_call>\n<tool_call>\n{TO_OSLO}\n</tool_call>",
     "I will look.", [PARIS, OSLO]),
    ("hermes", f'<tool_call>{TO_PARIS.replace(" ", "")}</tool_call>\n\nDone.', "\n\nDone.", [PARIS]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    ("hermes", f'<tool_call>\n{{"name": "search", "arguments": {CODE.arguments}}}\n</tool_call>', "", [CODE]),
    ("hermes", f"<tool_call>\n{GET}\"arguments\": {json.dumps(IN)}}}\n</tool_call>", "", [PARIS]),
    ("hermes", "No tools < needed <tool, thanks <tool_cal", "No tools < needed <tool, thanks <tool_cal", []),
    ("hermes", '{"name": "get_weather", "arguments": {}}', '{"name": "get_weather", "arguments": {}}', []),
    # Llama 3.1 and 3.2
    ("llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama", f'{GET}"parameters": {IN}}}; {GET}"parameters": {OSLO.arguments}}}', "", [PARIS, OSLO]),
    ("llama", '\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}\n', "", [PARIS]),
    ("llama", f'{{"name": "search", "parameters": {CODE.arguments}}}', "", [CODE]),
    ("llama", 'It is {"name": "get_weather", "parameters": {}} that you want.',
     'It is {"name": "get_weather", "parameters": {}} that you want.', []),
    ("llama", '{"answer": 42}', '{"answer": 42}', []),
    # Mistral 7B v0.3 and Nemo; Small 3 and later write the name before the arguments
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    ("mistral", f"[TOOL_CALLS] [{TO_PARIS}, {TO_OSLO}]", "", [PARIS, OSLO]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{IN}[TOOL_CALLS]get_weather[ARGS]{OSLO.arguments}", "", [PARIS, OSLO]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("mistral", 'Sure. [TOOL_CALLS]get_weather{"city": "Paris"}', "Sure.", [PARIS]),
    ("mistral", '[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    ("mistral", f'[TOOL_CALLS][{{"name": "search", "arguments": {CODE.arguments}}}]', "", [CODE]),
    ("mistral", "[1] says so, [TOOL", "[1] says so, [TOOL", []),
]  # fmt: skip
# Broken calls are content, as they were written; what comes after them is read on.
_BROKEN: tuple[tuple[ToolFormat, str], ...] = (
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {city: Paris}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "rm_rf", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call>'),
    ("hermes", "<tool_call>get_weather(Paris)</tool_call>"),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>\n{"name": ["get_weather"], "arguments": {}}\n</tool_call>'),
    ("llama", '{"name": "get_weather", "parameters": {"city": '),
    ("llama", '{"name": "rm_rf", "parameters": {}} and more'),
    ("llama", "{not json} at all"),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Par'),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {}}, {"name": "rm_rf"}]'),
    ("mistral", "[TOOL_CALLS]get_weather"),
    ("mistral", "[TOOL_CALLS]" + "x" * 400),
    ("mistral", '[TOOL_CALLS]get weather{"a": 1}'),
)
BROKEN: list[Recorded] = [(form, text, text, []) for form, text in _BROKEN]
OOPS = "<tool_call>{oops}</tool_call>"
BROKEN.append(("hermes", f"{OOPS}\n<tool_call>{TO_PARIS}</tool_call>", OOPS, [PARIS]))
EVERY = OUTPUTS + BROKEN


def read(form: ToolFormat, pieces: Sequence[str]) -> tuple[str, list[ToolCall]]:
    """Return the content and the calls of a text that comes in pieces."""
    parser = ToolCallParser(form, NAMES)
    told = [parser.push(piece) for piece in pieces] + [parser.push("", end=True)]
    return "".join(content for content, _ in told), [call for _, calls in told for call in calls]


@pytest.mark.parametrize("at", range(len(EVERY)))
def test_outputs_are_read_however_they_are_cut(at: int) -> None:
    """Whole, letter by letter, and cut in two at every place, the same content and the same calls."""
    form, text, content, calls = EVERY[at]
    cuts = [[text], list(text), *([text[:n], text[n:]] for n in range(1, len(text)))]
    for pieces in cuts:
        assert read(form, pieces) == (content, calls)


@given(
    st.lists(st.sampled_from([text for _, text, _, _ in EVERY]), min_size=1, max_size=4),
    st.randoms(),
    st.data(),
)
def test_any_text_is_read_the_same_however_cut(
    texts: list[str], rng: random.Random, data: st.DataObject
) -> None:
    """Outputs joined, damaged and cut at random: no cut changes what is read, and nothing but calls gets lost."""
    form = data.draw(st.sampled_from(sorted(TEMPLATES)))
    text = list("".join(texts))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text))
        text[at : at + rng.randrange(3)] = rng.choice(
            ["", "{", '"', "<", "]", "\n", "</tool_call>"]
        )
    joined = "".join(text)
    kind: Any = {"qwen": "hermes"}.get(form, form)
    whole = read(kind, [joined])
    pieces, left = [], joined
    while left:
        size = rng.randint(1, 9)
        pieces.append(left[:size])
        left = left[size:]
    assert read(kind, pieces) == whole
    if not whole[1]:
        assert whole[0].strip() == joined.strip()


THOUGHTS = [
    (False, "<think>\nHm, 2 < 3.\n</think>\n\nYes.", "Hm, 2 < 3.", "Yes."),
    (True, "Hm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
    (False, "Yes, <think> is a word.", "", "Yes, <think> is a word."),
    (False, "\n<think></think>Yes.", "", "Yes."),
    (True, "cut off </thin", "cut off </thin", ""),
    (False, "<think>cut off\n", "cut off", ""),
    (False, "<thi", "", "<thi"),
    (False, "", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("opened", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_told_from_content(
    opened: bool, text: str, reasoning: str, content: str
) -> None:
    """The marks and the line breaks around them belong to neither, wherever the text is cut."""
    cuts = [[text], list(text), *([text[:n], text[n:]] for n in range(1, len(text)))]
    for pieces in cuts:
        splitter = ReasoningSplitter(opened=opened)
        told = [splitter.push(piece) for piece in pieces] + [splitter.push("", end=True)]
        assert ("".join(r for r, _ in told), "".join(c for _, c in told)) == (reasoning, content)


# -- what the answer is bound to -----------------------------------------------------------------------

SCHEMA = {"$ref": "#/$defs/w", "$defs": {"w": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2]}},
    "required": ["city"], "additionalProperties": False,
}}}  # fmt: skip
FUNCTIONS = [FunctionBody("get_weather", "Weather", SCHEMA), FunctionBody("search")]


def spelt(matcher: LLMatcher, rng: random.Random, *, most: int = 600) -> Iterator[str]:
    """Yield the letters of a text that a grammar over bytes allows, drawn at random; it ends as soon as it may."""
    for _ in range(most):
        if matcher.is_accepting() and rng.random() < 0.5:
            return
        mask = matcher.compute_bitmask()
        ids = [at for at in range(256) if mask[at // 8] >> at % 8 & 1]
        likely = [at for at in ids if chr(at) in 'abcdeimnrsw{}[]":, \n' or len(ids) < 4] or ids
        if not ids:
            return
        token = rng.choice(likely)
        assert matcher.consume_token(token)
        yield chr(token)


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("parallel", [True, False])
def test_bound_answers_are_calls(form: ToolFormat, parallel: bool) -> None:
    """Whatever is drawn under the grammar of a required call is read as calls, with arguments of the schema."""
    encoder = TextEncoder(byte_tokenizer())
    wish = ToolWish(FUNCTIONS, required=True, parallel=parallel)
    grammar = bound(wish, form, encoder)
    assert fault(grammar) == ""
    ended = 0
    for seed in range(12):
        matcher = LLMatcher(LLTokenizer("byte"), definition(grammar), log_level=0)
        text = "".join(spelt(matcher, random.Random(seed)))
        if not matcher.is_accepting():
            continue
        ended += 1
        content, calls = read(form, [text])
        assert content == ""
        assert calls
        assert parallel or len(calls) == 1
        assert all(
            set(json.loads(c.arguments)) <= {"city", "days"} for c in calls if c.name == NAMES[0]
        )
    assert ended > 0


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
def test_free_answers_may_be_text_or_strict_calls(form: ToolFormat) -> None:
    """Where a tool is strict, or only one may be called, text is allowed as it is, and a call only as it must be."""
    encoder = TextEncoder(byte_tokenizer())
    grammar = bound(ToolWish(FUNCTIONS, required=False, parallel=False), form, encoder)
    assert fault(grammar) == ""
    right = next(
        t for f, t, c, calls in OUTPUTS if f == form and calls == [PARIS] and not c
    ).strip()
    if form == "mistral":
        right = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    for text, allowed in (
        ("Hello, how are you?", True),
        (right, True),
        (right[:-3] + "@@@", False),
        (right * 2, False),
    ):
        matcher = LLMatcher(LLTokenizer("byte"), definition(grammar), log_level=0)
        taken = matcher.try_consume_tokens(list(text.encode()))
        assert (taken == len(text.encode()) and matcher.is_accepting()) == allowed, text


def test_marks_that_are_special_tokens_are_drawn_as_such() -> None:
    """A bound answer of Mistral's begins with the token, and cannot spell the mark in letters."""
    tokenizer = byte_tokenizer(TOKENS["mistral"])
    encoder = TextEncoder(byte_tokenizer(TOKENS["mistral"]))
    (mark,) = encoder.special_ids(["[TOOL_CALLS]"])
    stop_ids, size = encoder.special_ids(["</s>"]), tokenizer.get_vocab_size()
    compiler = GrammarCompiler(Vocabulary(tokenizer.to_str().encode()), size, stop_ids)
    for required in (True, False):
        wish = ToolWish(FUNCTIONS, required=required, parallel=False)
        state = compiler.compile(bound(wish, "mistral", encoder), stop_ids).begin()
        mask = state.allowed([]) or b""
        first = {at for at in range(size) if mask[at // 8] >> at % 8 & 1}
        assert mark in first
        assert (first == {mark}) == required
        after = state.allowed([mark]) or b""
        assert [at for at in range(size) if after[at // 8] >> at % 8 & 1] == encoder.bare("[")
    too_much = FunctionBody("f", None, {"description": "x" * 70_000})
    with pytest.raises(InvalidRequest, match="together"):
        bound(ToolWish([too_much], required=True, parallel=False), "mistral", encoder)


def test_a_choice_of_tools() -> None:
    """Every `tool_choice` means what OpenAI says, and what makes no sense is refused."""
    tools = [ToolBody("function", each) for each in FUNCTIONS]
    named: dict[str, Any] = {"type": "function", "function": {"name": "search"}}
    assert wish_of(None, None, parallel=None) is None
    assert wish_of(tools, "none", parallel=None) is None
    auto, required, one = (
        wish_of(tools, choice, parallel=None) for choice in (None, "required", named)
    )
    assert auto is not None
    assert (auto.required, auto.bound) == (False, False)
    assert required is not None
    assert (required.required, len(required.functions), required.parallel) == (True, 2, True)
    assert one is not None
    assert ([each.name for each in one.functions], one.parallel) == (["search"], False)
    single = wish_of(tools, "auto", parallel=False)
    assert single is not None
    assert single.bound
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidRequest, match="deeply"):
        wish_of([ToolBody("function", FunctionBody("f", None, deep))], "auto", parallel=None)
    wrong: dict[str, Any] = {"type": "function", "function": {"name": "nothing"}}
    for given_, choice in (
        (tools, wrong),
        (tools, "any"),
        (None, "required"),
        (tools * 2, "auto"),
        (tools, {}),
    ):
        with pytest.raises(InvalidRequest):
            wish_of(given_, choice, parallel=None)


def test_formats_are_known_by_their_templates() -> None:
    """The format is read off the template; one without tools, or with another way to call, has none."""
    found = {name: format_of(template) for name, template in TEMPLATES.items()}
    assert found == {"llama": "llama", "mistral": "mistral", "hermes": "hermes", "qwen": "hermes"}
    assert format_of("{{ messages }}") is None
    assert format_of("{{ tools }}<tool_call><function=x>") is None
