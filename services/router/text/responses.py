"""Responses: bodies of OpenAI's Responses API, parsed into a conversation, and rendered into one generate job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from common.errors import InvalidRequest
from common.wire.sessions import SessionTurn
from common.wire.workflows import ResponseOptions
from services.router.text.bodies import decode
from services.router.text.chats import chat_prompt
from services.router.text.generation_bodies import (
    MAX_MESSAGES,
    GenerateBody,
    TokenCount,
    check_stream,
    unsupported,
)
from services.router.text.generations import GenerationSpec, generation_of, options_of
from services.router.text.requests import choose
from services.router.text.tokens import Spec

LOGPROBS = "message.output_text.logprobs"
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal")
Metadata = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class InputPart(Struct, frozen=True):
    """One part of an input message: a text, or a refusal that an earlier answer was."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True):
    """One item of the input; only messages are taken, those of earlier answers as they came included."""

    type: str = "message"
    role: str | None = None
    content: str | Annotated[list[InputPart], Meta(max_length=MAX_MESSAGES)] | None = None


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
    tools: Any = None
    tool_choice: Any = None
    text: Any = None
    truncation: Any = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def stored(self) -> bool:
        """Whether the response is kept, so that another one can go on from it."""
        return self.store is not False


class ResponsePeek(Struct, frozen=True):
    """The fields of a body that are read before the body is parsed."""

    previous_response_id: str | None = None


class ResponseContext(Struct, frozen=True):
    """What comes before a response: the messages of earlier ones, and their model, the default of this one.

    `session`, which stands at `version`, keeps the response unless the request says otherwise.
    """

    messages: list[dict[str, str]]
    model: str | None
    session: str
    version: int
    ttl_s: int


class ResponseRequest(Struct, frozen=True):
    """A validated request for a response, with its job; `options` keep what the answer repeats of the request."""

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

    Instructions stand before it and are of this response only: no later one inherits them.
    """
    body = decode(raw, ResponsesBody)
    _check(body)
    spec = choose(specs, body.model or before.model, default, ("generate",))
    said = _messages(body)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    prompt, _ = chat_prompt(spec, [*system, *before.messages, *said])
    wanted = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    options = options_of(
        body,
        spec,
        max_new=body.max_output_tokens or 0,
        logprobs=(body.top_logprobs or 0) if wanted else -1,
        low=low,
    )
    sampling = options.sampling
    asked = _repeated(body, sampling.temperature, sampling.top_p)
    turn = None
    if body.stored:
        turn = SessionTurn(
            session=before.session,
            version=before.version,
            history=0,  # rendered anew each time, since instructions come first and may differ
            messages=msgspec.json.encode(said),
            ttl_s=before.ttl_s,
            asked=asked,
        )
    made = generation_of(options, spec, scope, [prompt], turn=turn, param="input")
    view = ResponseOptions(
        kind="response",
        model=spec.name,
        tokens=made.prompt_tokens,
        fingerprint=spec.fingerprint,
        stream=bool(body.stream),
        logprobs=options.logprobs,
        session=made.session,
        asked=asked,
    )
    return ResponseRequest(spec.name, body.stored, made, view)


def _check(body: ResponsesBody) -> None:
    """Refuse what would change the answer and is not supported."""
    for param in ("tools", "background", "conversation", "prompt"):
        if getattr(body, param):
            raise unsupported(param, "not supported by this server; leave it out")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tools are not supported by this server; leave it out")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "expected disabled: no prompt is ever cut")
    if (body.n or 1) > 1:
        raise unsupported("n", "expected 1")
    form = body.text.get("format") if isinstance(body.text, dict) else body.text
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise unsupported("text.format", 'expected {"type": "text"}')
    check_stream(body)


def _repeated(body: ResponsesBody, temperature: float, top_p: float) -> bytes:
    """Return, as JSON, the fields of the answer that repeat its request."""
    return msgspec.json.encode(
        {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.stored,
            "temperature": temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": top_p,
            "truncation": "disabled",
            "user": body.user,
        }
    )


def _messages(body: ResponsesBody) -> list[dict[str, str]]:
    """Return the input as templates take it: role (system, user or assistant) and content."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return [_message(item, index) for index, item in enumerate(body.input)]


def _message(item: InputItem, index: int) -> dict[str, str]:
    where = f"input[{index}]"
    if item.type != "message":
        raise unsupported(where, f"an item of type {item.type[:40]!r}; expected message")
    if item.role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role is {(item.role or '')[:40]!r}: expected {', '.join(_ROLES)}",
            code="invalid_value",
            param=f"{where}.role",
        )
    content = item.content
    if content is None:
        raise InvalidRequest(
            f"{where}.content: expected a text, or a list of text parts",
            code="invalid_value",
            param=f"{where}.content",
        )
    text = content if isinstance(content, str) else _joined(content, f"{where}.content")
    return {"role": _ROLES[item.role], "content": text}


def _joined(parts: Sequence[InputPart], where: str) -> str:
    texts = []
    for at, part in enumerate(parts):
        text = part.text if part.text is not None else part.refusal
        if part.type not in _TEXTS or text is None:
            raise unsupported(
                f"{where}[{at}]",
                f"a part of type {part.type[:40]!r} is not supported; expected input_text",
            )
        texts.append(text)
    return "\n".join(texts)
