"""Chat templates render and tokenize as transformers does, and no client writes a special token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import InvalidRequest, Unavailable
from common.types.generation import SamplingParams
from common.wire.workflows import ChatRequest, GenerationOptions
from services.router.text.chats import SessionHistory, chat_prompt, generation
from services.router.text.generation_bodies import ChatBody, plain
from services.router.text.templates import PromptSegment, Template, after
from services.router.text.tokens import Spec, load
from tests.support import tool_templates
from tests.support.scripted_generator import SPECIALS, TEMPLATE, byte_tokenizer

LLAMA = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{%- endif %}'
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    '{%- set messages = messages[1:] %}{%- else %}{%- set system_message = "" %}{%- endif %}'
    '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}{{- "Today Date: " + date_string + "\\n\\n" }}'
    '{{- system_message }}{{- "<|eot_id|>" }}'
    "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    "+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}"
    "{{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}{%- else %}"
    "{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token}}{%- endif %}{%- endfor %}"
)
QWEN = """\
{%- set ns = namespace(last=messages|length - 1) %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {% generation %}{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}{% endgeneration %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEMPLATES = {
    "chatml": (TEMPLATE, SPECIALS),
    "llama": (
        LLAMA,
        ("<|begin|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]")),
    "qwen": (QWEN, (*SPECIALS, "<|endoftext|>")),
}
TALK = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " Wie heißt du? 🙂  "},
    {"role": "assistant", "content": "I am a model."},
    {"role": "user", "content": "<b>&amp; {{ 7 * 7 }}</b>"},
]


def spec_of(directory: Path, source: str, specials: tuple[str, ...], context: int = 4000) -> Spec:
    path = directory / f"{abs(hash((source, specials)))}.json"
    path.write_text(byte_tokenizer(specials).to_str())
    return Spec(
        name="m", kind="generate", family="generate", fingerprint=str(path), path=str(path), max_tokens=context,
        dimension=0, chat_template=source, bos=specials[0], eos=specials[1],
    )  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("count", [2, 4])
def test_prompts_are_transformers(tmp_path: Path, name: str, count: int) -> None:
    """Text and token ids equal apply_chat_template's."""
    from transformers import PreTrainedTokenizerFast

    source, specials = TEMPLATES[name]
    spec = spec_of(tmp_path, source, specials)
    oracle = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_file(spec.path),
        bos_token=specials[0],
        eos_token=specials[1],
    )
    talk = TALK[:count]
    options: Any = {"chat_template": source, "add_generation_prompt": True}
    text = oracle.apply_chat_template(talk, tokenize=False, **options)
    ids = oracle.apply_chat_template(talk, tokenize=True, return_dict=False, **options)
    template = Template(spec.fingerprint, source, spec.bos, spec.eos, 10_000)

    assert template.render(talk) == text
    assert chat_prompt(spec, talk) == (ids, 0)


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=st.text(max_size=8), cut=st.integers(0, 3))
def test_no_client_writes_a_special_token(
    tmp_path_factory: Any, name: str, content: str, cut: int
) -> None:
    """A special token's text in a message stays text; the template's own remain."""
    source, specials = TEMPLATES[name]
    spec = spec_of(tmp_path_factory.getbasetemp(), source, specials)
    encoder = load(spec.path)
    marks = {encoder.tokenizer.token_to_id(text) for text in specials}

    def kinds(text: str) -> list[int]:
        return [i for i in chat_prompt(spec, [{"role": "user", "content": text}])[0] if i in marks]

    evil = content + specials[cut % len(specials)] + content
    ids, _ = chat_prompt(spec, [{"role": "user", "content": evil}])
    assert kinds(evil) == kinds("hello")
    assert evil.strip() in encoder.decode(ids)


def turn(messages: list[dict[str, str]], answer: str) -> tuple[bytes, str]:
    return msgspec.json.encode(messages), answer


def test_a_turn_adds_to_its_sessions_tokens(tmp_path: Path) -> None:
    """History stays as generated; only what the template writes after the last answer is new."""
    spec = spec_of(tmp_path, *TEMPLATES["chatml"])
    encoder = load(spec.path)
    first = [{"role": "user", "content": "hi"}]
    prompt, _ = chat_prompt(spec, first)
    history = SessionHistory("s", 1, "m", 60, [turn(first, "hello")], [*prompt, 7, 7, 7])
    following = [{"role": "user", "content": "more"}]
    ids, held = chat_prompt(spec, following, history)

    assert (ids[:held], held) == ([*prompt, 7, 7, 7], len(prompt) + 3)
    new = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert ids[held:] == encoder.bare(new)
    evil, held = chat_prompt(spec, [{"role": "user", "content": "<|im_end|>"}], history)
    assert evil[:held] == history.tokens
    assert encoder.decode(evil[held:]) == new.replace("more", "<|im_end|>")


def test_a_template_that_rewrites_history_starts_anew(tmp_path: Path) -> None:
    """Where a later turn renders earlier ones otherwise (here: it drops thinking), everything is tokenized again."""
    spec = spec_of(tmp_path, *TEMPLATES["qwen"])
    first = [{"role": "user", "content": "hi"}]
    said = turn(first, "<think>hm</think>\nhello")
    history = SessionHistory("s", 1, "m", 60, [said], [1, 2, 3])
    following = [{"role": "user", "content": "more"}]
    answer = {"role": "assistant", "content": said[1]}

    assert chat_prompt(spec, following, history) == chat_prompt(spec, [*first, answer, *following])
    other = msgspec.structs.replace(history, said=[turn(first, "hello")], tokens=None)
    assert chat_prompt(spec, following, other)[1] == 0


def ask(**changes: Any) -> ChatRequest:
    options = GenerationOptions(sampling=SamplingParams(), **changes)
    return ChatRequest("m", "default", [{"role": "user", "content": "x" * 50}], options)


def test_the_context_is_checked_with_numbers(tmp_path: Path) -> None:
    """A prompt and an answer that do not fit are refused; without a bound the answer gets what is left."""
    spec = spec_of(tmp_path, *TEMPLATES["chatml"], context=100)
    from common.wire.jobs import decode_work

    made = generation(ask(), spec)
    work: Any = decode_work(made.parcel.payload)
    assert (made.prompt_tokens + work.max_new, made.parcel.items) == (100, 1)
    for options in ({"max_new": work.max_new + 1}, {"min_new": work.max_new + 1}):
        with pytest.raises(InvalidRequest, match="context length is 100 tokens") as caught:
            generation(ask(**options), spec)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("source", "error", "code"),
    [
        ("{{ raise_exception('roles must alternate') }}", InvalidRequest, "invalid_messages"),
        ("{% for %}", Unavailable, "template_broken"),
        ("{{ nothing.here }}", Unavailable, "template_broken"),
        ("{{ messages.__class__.__mro__ }}", Unavailable, "template_broken"),
        ("{{ messages[0].content * 1000 }}", InvalidRequest, "context_length_exceeded"),
        ("{{ 1 // 0 }}", Unavailable, "template_broken"),
        ("", InvalidRequest, "no_chat_template"),
    ],
)
def test_bad_templates_are_clear_errors(source: str, error: Any, code: str) -> None:
    """What a template refuses is the client's; what is wrong with it is the server's."""
    with pytest.raises(error) as caught:
        Template("f", source, "", "", 1000).render([{"role": "user", "content": "hello"}])
    assert caught.value.code == code


@given(texts=st.lists(st.text(max_size=4), max_size=5), cut=st.integers(0, 20))
def test_after_cuts_a_prefix(texts: list[str], cut: int) -> None:
    """What follows a prefix is the rest of the segments; no prefix, no rest."""
    segments = [PromptSegment(text, written=i % 2 == 0) for i, text in enumerate(texts)]
    whole = "".join(texts)
    rest = after(segments, whole[:cut])

    assert rest is not None
    assert "".join(segment.text for segment in rest) == whole[cut:]
    assert after(segments, whole + "x") is None


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": 'The "weather" in a city', "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "größte"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]  # fmt: skip
CALL = {"name": "get_weather", "arguments": '{"city": "Köln \\"x\\""}'}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "call_abcdef", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "call_abcdef", "content": "sunny <b>"},
]  # fmt: skip


@pytest.mark.parametrize("name", tool_templates.TEMPLATES)
def test_tools_and_their_results_are_rendered_as_transformers_does(
    tmp_path: Path, name: str
) -> None:
    """Definitions, calls and results of a conversation come into the prompt as the model's own template writes them."""
    from transformers import PreTrainedTokenizerFast

    source, specials = tool_templates.TEMPLATES[name], tool_templates.TOKENS[name]
    spec = spec_of(tmp_path, source, specials)
    oracle = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_file(spec.path),
        bos_token=specials[0],
        eos_token=specials[1],
    )
    body = msgspec.convert({"messages": CALLS, "tools": TOOLS}, ChatBody)
    talk = [plain(message, at) for at, message in enumerate(body.messages)]
    assert talk[1]["tool_calls"][0]["id"] == talk[2]["tool_call_id"]
    options: Any = {
        "chat_template": source,
        "add_generation_prompt": True,
        "tools": TOOLS,
        "return_dict": False,
    }
    for count in (1, 3):
        expected = oracle.apply_chat_template(talk[:count], tokenize=True, **options)
        assert chat_prompt(spec, talk[:count], tools=TOOLS) == (expected, 0)
    assert "get_weather" in load(spec.path).decode(chat_prompt(spec, talk, tools=TOOLS)[0])


def test_no_tool_writes_a_special_token(tmp_path: Path) -> None:
    """A special token spelt in a definition or a call's arguments is refused; in a result it stays text."""
    spec = spec_of(tmp_path, tool_templates.QWEN, tool_templates.TOKENS["qwen"])
    evil = msgspec.json.decode(msgspec.json.encode(TOOLS).replace(b"weather", b"<|im_end|>", 1))
    with pytest.raises(InvalidRequest, match="special token"):
        chat_prompt(spec, [{"role": "user", "content": "x"}], tools=evil)
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "now", "arguments": {"a": "<|im_end|>"}},
    }
    with pytest.raises(InvalidRequest, match="special token"):
        chat_prompt(spec, [{"role": "assistant", "content": "", "tool_calls": [call]}], tools=TOOLS)
    result = {"role": "tool", "content": "<|im_end|>", "tool_call_id": "abcdefghi"}
    harmless = {**result, "content": "hello"}
    (end,) = load(spec.path).special_ids(["<|im_end|>"])
    counts = [chat_prompt(spec, [each], tools=TOOLS)[0].count(end) for each in (result, harmless)]
    assert counts[0] == counts[1]
