"""JSON bodies of generations in OpenAI's shapes: declared fields are read, all others are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from common.errors import InvalidRequest
from common.wire.search import Diversity, Mode
from services.router.text.bodies import ModelName, Name, SearchEffort, check_json
from services.router.text.intervals import LEAST, MOST
from services.router.text.response_format import ResponseFormat
from services.router.text.tools import (
    MAX_TOOLS,
    ToolBody,
    ToolCallBody,
    short_id,
    templated_calls,
)

MAX_CHOICES = 16
MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIAS = 1024
DEFAULT_K = 5
MAX_K = 100
MAX_REWRITE_TOKENS = 512
DEFAULT_CANDIDATES = 16

Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenCount = Annotated[int, Meta(ge=1, le=1 << 31)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class ContentPart(Struct, frozen=True):
    """One part of a message's content; only `type` "text" is accepted."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    """One message of a conversation; fields copied from an answer (nulls, empty lists) are accepted."""

    role: str
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")] | None = None
    tool_calls: Annotated[list[ToolCallBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    reasoning_content: str | None = None
    function_call: Any = None
    audio: Any = None


class StreamOptions(Struct, frozen=True):
    """The options of a stream."""

    include_usage: bool = False


class RewriteBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`retrieval.rewrite`: a rule or a model, by default the chat's, rewrites a follow-up, in at most `max_tokens`."""

    by: Literal["model", "rule"] = "model"
    model: ModelName | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_REWRITE_TOKENS)] = 64


class RerankOptionsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`retrieval.rerank`: the cross-encoder, and the number of hits that it scores: 16, or k if that is more."""

    model: ModelName | None = None
    candidates: Annotated[int, Meta(ge=1, le=MAX_K)] | None = None


class RetrievalBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`retrieval` of a chat request: search `collection` for the last user message and answer from the hits."""

    collection: Name
    k: Annotated[int, Meta(ge=1, le=MAX_K)] = DEFAULT_K
    filter: dict[str, Any] | None = None
    min_score: float | None = None
    include_passages: bool = False
    mode: Mode | None = None
    mmr: Diversity | None = None
    rewrite: bool | RewriteBody | None = None
    rerank: bool | RerankOptionsBody | None = None
    effort: SearchEffort | None = None
    interval: Annotated[int, Meta(ge=LEAST, le=MOST)] | Literal["auto"] | None = None
    stale: bool | None = None
    late: Literal["wait", "keep"] | None = None
    shift: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    place: Literal["before", "after"] | None = None
    precomputed: bool | None = None


class GenerateBody(Struct, frozen=True, kw_only=True):
    """The fields that chats, completions and responses have in common."""

    model: ModelName | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=MAX_BIAS),
        ]
        | None
    ) = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Other servers' ways to bind an answer, which are refused.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    structured_outputs: Any = None
    structural_tag: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    continue_final_message: Any = None


# Unsupported fields that would change the answer, and the advice in each field's refusal.
BINDING = {
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_json_object",
            "structured_outputs",
            "structural_tag",
            "json_schema",
            "regex",
            "ebnf",
            "grammar",
        ),
        "use response_format",
    ),
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias",
    "continue_final_message": "use /v1/completions",
}


class ChatBody(GenerateBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    session: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    keep_partial: bool = False
    wait: bool = False
    retrieval: RetrievalBody | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class CompletionBody(GenerateBody, frozen=True, kw_only=True):
    """POST /v1/completions; `prompt` is a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


def unsupported(param: str, what: str) -> InvalidRequest:
    """Return the error for a parameter of OpenAI's that this server does not have."""
    return InvalidRequest(f"{param}: {what}", code="unsupported", param=param)


def check_chat(body: ChatBody) -> None:
    """Refuse unsupported parameters, and combinations that make no sense."""
    for param in ("functions", "web_search_options", "audio"):
        if getattr(body, param):
            raise unsupported(param, "not supported by this server; leave it out")
    if body.function_call not in (None, "none", "auto"):
        raise unsupported("function_call", "not supported by this server; use tool_choice")
    if body.modalities not in (None, [], ["text"]):
        raise unsupported("modalities", 'expected ["text"]')
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(
            "top_logprobs: expected only with logprobs true",
            code="invalid_value",
            param="top_logprobs",
        )
    check_binding(body)
    if body.retrieval is not None:
        _check_retrieval(body.retrieval)
    if body.retrieval is not None and (body.n or 1) > 1:
        raise unsupported("n", "expected 1 with retrieval")
    for param, used in (("response_format", binds(body)), ("tools", bool(body.tools))):
        if body.retrieval is not None and used:
            raise unsupported(param, "not supported together with retrieval")
    if body.tools and binds(body):
        raise unsupported("response_format", "not supported together with tools")
    if body.session is not None and (body.n or 1) > 1:
        raise InvalidRequest("n: expected 1 with session", code="invalid_value", param="n")
    check_stream(body)


def _check_retrieval(body: RetrievalBody) -> None:
    if body.filter is not None:
        check_json(body.filter, "retrieval.filter")
    for name in ("stale", "late", "shift"):
        if getattr(body, name) is not None and body.interval is None:
            raise _contradicts(name, "expected only with retrieval.interval")
    if body.stale is False and body.late == "keep":
        raise _contradicts(
            "late", "expected wait where retrievals are not stale: they are waited for"
        )
    if body.stale is False and body.shift:
        raise _contradicts("shift", "expected 0 where retrievals are not stale")


def _contradicts(name: str, why: str) -> InvalidRequest:
    param = f"retrieval.{name}"
    return InvalidRequest(f"{param}: {why}", code="invalid_value", param=param)


def check_completion(body: CompletionBody) -> None:
    """Refuse unsupported parameters, and combinations that make no sense."""
    if body.suffix:
        raise unsupported("suffix", "not supported by this server; leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "expected the same number as n")
    check_binding(body)
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "not supported together with logprobs")
    check_stream(body)


def binds(body: GenerateBody) -> bool:
    """True if the answer must match a grammar."""
    return body.response_format is not None and body.response_format.type != "text"


def check_binding(body: GenerateBody) -> None:
    """Refuse other servers' fields that bind an answer, and fields that contradict a response format."""
    for name, instead in BINDING.items():
        if getattr(body, name) not in (None, False):
            raise unsupported(name, f"not supported by this server; {instead}")
    if binds(body):
        check_bound(body, "response_format")


def check_bound(body: GenerateBody, by: str) -> None:
    """Refuse fields that contradict a grammar, since the grammar decides where an answer ends."""
    if body.ignore_eos:
        raise unsupported("ignore_eos", f"expected false with {by}")
    if body.min_tokens:
        raise unsupported("min_tokens", f"expected 0 with {by}")


def check_stream(body: GenerateBody) -> None:
    """Refuse stream_options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options: expected only with stream true",
            code="invalid_value",
            param="stream_options",
        )


def plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """Return a message in the form of templates: role, content, and its name, calls and reasoning if it has any."""
    where = f"messages[{index}]"
    role = "system" if message.role == "developer" else message.role
    if role == "function" or message.function_call:
        raise unsupported(where, "functions are not supported by this server; use tools")
    if role not in {"system", "user", "assistant", "tool"}:
        raise InvalidRequest(
            f"{where}.role is {message.role[:40]!r}: expected system, developer, user, assistant or tool",
            code="invalid_value",
            param=f"{where}.role",
        )
    if message.audio:
        raise unsupported(f"{where}.audio", "not supported by this server")
    called = _called(message, role, where)
    content = message.content
    if content is None and "tool_calls" in called:
        content = ""
    if content is None:
        raise InvalidRequest(
            f"{where}.content: expected a text, or a list of text parts",
            code="invalid_value",
            param=f"{where}.content",
        )
    shown = {"role": role, "content": content if isinstance(content, str) else "", **called}
    if not isinstance(content, str):
        texts = []
        for at, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise unsupported(
                    f"{where}.content[{at}]",
                    f"a part of type {part.type[:40]!r} is not supported; expected text",
                )
            texts.append(part.text)
        shown["content"] = "\n".join(texts)
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _called(message: ChatMessage, role: str, where: str) -> dict[str, Any]:
    """Return a message's calls and reasoning, or the id of the call that it answers, in the form of templates."""
    if role == "tool":
        if message.tool_call_id is None:
            raise InvalidRequest(
                f"{where}.tool_call_id is missing: expected the id of the call that it answers",
                code="invalid_value",
                param=f"{where}.tool_call_id",
            )
        return {"tool_call_id": short_id(message.tool_call_id)}
    if role != "assistant":
        return {}
    found: dict[str, Any] = {}
    if message.tool_calls:
        found["tool_calls"] = templated_calls(message.tool_calls, where)
    if message.reasoning_content:
        found["reasoning_content"] = message.reasoning_content
    return found
