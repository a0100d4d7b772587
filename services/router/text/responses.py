"""Responses: bodies of OpenAI's Responses API, parsed into a conversation, and rendered into one generate job.

A body is turned into the body of a chat, so the rules of chats for tools, formats and options hold for responses, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from common.errors import InvalidRequest
from common.types.generation import SamplingParams
from common.wire.sessions import SessionTurn
from common.wire.workflows import AnswerMarks, ResponseOptions
from services.router.responses.answer_format import call_id, read_whole
from services.router.text.bodies import decode
from services.router.text.chats import generation, marks_of, request_of
from services.router.text.generation_bodies import (
    MAX_MESSAGES,
    ChatBody,
    ChatMessage,
    GenerateBody,
    TokenCount,
    check_chat,
    unsupported,
)
from services.router.text.generations import GenerationSpec
from services.router.text.requests import choose
from services.router.text.response_format import ResponseFormat, SchemaFormat
from services.router.text.tokens import Spec
from services.router.text.tools import (
    MAX_TOOLS,
    CalledFunction,
    FunctionBody,
    FunctionName,
    ToolBody,
    ToolCallBody,
)

LOGPROBS = "message.output_text.logprobs"
_ROLES = ("developer", "system", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_SAME = tuple(GenerateBody.__struct_fields__)  # fields that chats have under the same names
Metadata = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class InputPart(Struct, frozen=True):
    """One part of an input message: a text, or the refusal of an earlier answer."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | Annotated[list[InputPart], Meta(max_length=MAX_MESSAGES)]


class InputItem(Struct, frozen=True):
    """One item of the input: a message, a call made by an earlier answer, or the output of such a call."""

    type: str = "message"
    role: str | None = None
    content: Content | None = None
    call_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: Content | None = None


class ResponseTool(Struct, frozen=True):
    """A function that the model may call, the only kind of tools there is."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Struct, frozen=True):
    """The form that a response's text must have; `schema`, `name` and `strict` belong to the type `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True):
    """The options of a response's text."""

    format: TextFormat | None = None


class ResponsesBody(GenerateBody, frozen=True, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=400)] | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    user: str | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    text: TextOptions | None = None
    truncation: Any = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def stored(self) -> bool:
        """Whether the response is kept, so that a later response can continue from it."""
        return self.store is not False


class ResponsePeek(Struct, frozen=True):
    """The fields of a body that are read before the body is parsed."""

    previous_response_id: str | None = None


class EarlierTurn(Struct, frozen=True):
    """A turn before a response: its job's unique part, its messages as a JSON list, and its answer with its marks."""

    unique: str
    messages: bytes
    answer: str
    marks: AnswerMarks | None = None


class ResponseContext(Struct, frozen=True):
    """The context of a response: the earlier turns, and their model, which is the response's default.

    The session named `session`, at version `version`, keeps the response unless the request says otherwise.
    """

    turns: Sequence[EarlierTurn]
    model: str | None
    session: str
    version: int
    ttl_s: int


class ResponseRequest(Struct, frozen=True):
    """A validated request for a response, with its job; `options` hold the request's fields that the answer repeats."""

    model: str
    stored: bool
    made: GenerationSpec
    options: ResponseOptions


def peek(raw: bytes) -> ResponsePeek:
    """Return a body's reference to an earlier response; none for a faulty body, which `response` then refuses."""
    try:
        return msgspec.json.decode(raw, type=ResponsePeek)
    except (ValueError, RecursionError):
        return ResponsePeek()


def model_of(raw: bytes, specs: dict[str, Spec], default: str, before: str | None) -> str:
    """Return the name of the model that a body asks for; NotFound `model_not_found`."""
    body = decode(raw, ResponsesBody)
    return choose(specs, body.model or before, default, ("generate",)).name


def response(
    raw: bytes,
    specs: dict[str, Spec],
    default: str,
    scope: str,
    before: ResponseContext,
    *,
    low: bool = False,
) -> ResponseRequest:
    """Parse the body of POST /v1/responses, and render and tokenize its whole conversation.

    Instructions come before the conversation and hold for this response only: later responses do not inherit them.
    """
    body = decode(raw, ResponsesBody)
    _check(body)
    chat = _chat(body)
    check_chat(chat)
    spec = choose(specs, body.model or before.model, default, ("generate",))
    ask = request_of(chat, spec, scope, low=low)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    asked = _repeated(body, ask.options.sampling, ask.marks)
    turn = None
    if body.stored:
        turn = SessionTurn(
            session=before.session,
            version=before.version,
            history=0,  # rendered each time, since instructions come first and may differ
            messages=msgspec.json.encode(ask.messages),
            ttl_s=before.ttl_s,
            asked=asked,
        )
    together = [*system, *_earlier(before.turns), *ask.messages]
    made = generation(ask, spec, messages=together, turn=turn, param="input")
    view = ResponseOptions(
        kind="response",
        model=spec.name,
        tokens=made.prompt_tokens,
        fingerprint=spec.fingerprint,
        stream=bool(body.stream),
        logprobs=ask.options.logprobs,
        session=made.session,
        asked=asked,
        marks=marks_of(ask, made),
    )
    return ResponseRequest(spec.name, body.stored, made, view)


def _earlier(turns: Sequence[EarlierTurn]) -> list[dict[str, Any]]:
    """Return earlier turns as messages, with the calls that their answers made."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        found += msgspec.json.decode(turn.messages, type=list[dict[str, Any]])
        gained = read_whole(turn.marks, turn.answer)
        message: dict[str, Any] = {"role": "assistant", "content": gained.content}
        if gained.calls:
            message["tool_calls"] = [
                {
                    "id": call_id(turn.unique, at),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": msgspec.json.decode(call.arguments),
                    },
                }
                for at, call in enumerate(gained.calls)
            ]
        found.append(message)
    return found


def _check(body: ResponsesBody) -> None:
    """Refuse unsupported fields that would change the answer."""
    for param in ("background", "conversation", "prompt"):
        if getattr(body, param):
            raise unsupported(param, "not supported by this server; leave it out")
    for at, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise unsupported(
                f"tools[{at}]", f"a tool of type {tool.type[:40]!r}; expected function"
            )
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "expected disabled: no prompt is ever cut")
    if body.response_format is not None:
        raise unsupported("response_format", "expected text.format instead")
    if (body.n or 1) > 1:
        raise unsupported("n", "expected 1")


def _chat(body: ResponsesBody) -> ChatBody:
    """Return the body of a chat that asks for the same as a response's body."""
    wanted = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    same = {name: getattr(body, name) for name in _SAME}
    given = (
        [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    return ChatBody(
        **{**same, "max_tokens": None, "response_format": _format(body.text)},
        messages=_messages(given),
        max_completion_tokens=body.max_output_tokens,
        logprobs=wanted or None,
        top_logprobs=body.top_logprobs,
        tools=[_tool(tool, at) for at, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
    )


def _format(text: TextOptions | None) -> ResponseFormat | None:
    form = text.format if text is not None else None
    if form is None:
        return None
    if form.type == "json_schema":
        return ResponseFormat("json_schema", SchemaFormat(form.schema, form.name, form.strict))
    return ResponseFormat(form.type)


def _tool(tool: ResponseTool, at: int) -> ToolBody:
    if tool.name is None:
        raise _invalid(f"tools[{at}].name", "is missing: expected the function's name")
    function = FunctionBody(tool.name, tool.description, tool.parameters, tool.strict)
    return ToolBody("function", function)


def _choice(choice: Any) -> Any:
    """Return a tool choice in the form of chats, where the function's name is one level deeper."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _repeated(body: ResponsesBody, sampling: SamplingParams, marks: AnswerMarks) -> bytes:
    """Return, as JSON, the answer's fields that repeat its request, and the `marks` by which its text is read."""
    form = body.text.format if body.text is not None else None
    repeated: dict[str, Any] = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.stored,
        "temperature": sampling.temperature,
        "text": {"format": form or TextFormat()},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
    if marks != AnswerMarks():
        repeated["marks"] = marks
    return msgspec.json.encode(repeated)


def _messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the input as a chat's messages; consecutive calls become one message."""
    found: list[ChatMessage] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "function_call":
            call = _call(item, where)
            last = found[-1] if found else None
            if (
                last is not None
                and last.role == "assistant"
                and index
                and _follows(items[index - 1])
            ):
                calls = [*(last.tool_calls or ()), call]
                found[-1] = msgspec.structs.replace(last, tool_calls=calls)
            else:
                found.append(ChatMessage("assistant", "", tool_calls=[call]))
        elif item.type == "function_call_output":
            if item.call_id is None:
                raise _invalid(f"{where}.call_id", "is missing: expected the id of the call")
            text = _text(item.output, f"{where}.output")
            found.append(ChatMessage("tool", text, tool_call_id=item.call_id))
        elif item.type == "message":
            found.append(_message(item, where))
        elif item.type != "reasoning":  # a model is not shown its earlier reasoning
            raise unsupported(
                where, f"an item of type {item.type[:40]!r}; expected message or function_call"
            )
    return found


def _follows(item: InputItem) -> bool:
    """Return whether a call after this item belongs to the same message."""
    return item.type == "function_call" or item.role == "assistant"


def _call(item: InputItem, where: str) -> ToolCallBody:
    if item.call_id is None or item.name is None:
        raise _invalid(where, "expected call_id and name")
    return ToolCallBody(item.call_id, CalledFunction(item.name, item.arguments or "{}"))


def _message(item: InputItem, where: str) -> ChatMessage:
    if item.role not in _ROLES:
        raise _invalid(
            f"{where}.role", f"is {(item.role or '')[:40]!r}: expected {', '.join(_ROLES)}"
        )
    return ChatMessage(item.role, _text(item.content, f"{where}.content"))


def _text(content: Content | None, where: str) -> str:
    if content is None:
        raise _invalid(where, "is missing: expected a text, or a list of text parts")
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        text = part.text if part.text is not None else part.refusal
        if part.type not in _TEXTS or text is None:
            raise unsupported(
                f"{where}[{at}]",
                f"a part of type {part.type[:40]!r} is not supported; expected input_text",
            )
        texts.append(text)
    return "\n".join(texts)


def _invalid(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {what}", code="invalid_value", param=param)
