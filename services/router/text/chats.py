"""Chats: a body is parsed into messages and options; messages and history are rendered into a whole prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from common.errors import InvalidRequest
from common.wire.sessions import SessionTurn
from common.wire.workflows import (
    AnswerMarks,
    ChatRequest,
    RerankOptions,
    RetrievalOptions,
    RewriteOptions,
    ToolFormat,
)
from services.router.responses.tool_calls import THINK
from services.router.text.bodies import decode
from services.router.text.generation_bodies import (
    DEFAULT_CANDIDATES,
    ChatBody,
    RerankOptionsBody,
    RetrievalBody,
    RewriteBody,
    binds,
    check_bound,
    check_chat,
    plain,
)
from services.router.text.generations import GenerationSpec, generation_of, options_of
from services.router.text.overflow import CHARACTERS_PER_TOKEN, overflow
from services.router.text.requests import choose
from services.router.text.templates import Messages, PromptSegment, Template, Tools, after
from services.router.text.tokens import Spec, TextEncoder, load
from services.router.text.tools import (
    ToolWish,
    bound,
    format_of,
    reasons,
    rendered,
    shown_ids,
    wish_of,
)


class SessionHistory(Struct, frozen=True):
    """A session as it was read, with the data for rendering and tokenizing its next turn.

    `said` holds each turn's messages (a JSON list, as rendered) and answer; `tokens` are the token ids of the whole
    history, None if it must be tokenized again.
    """

    session: str
    version: int
    model: str
    ttl_s: int
    said: list[tuple[bytes, str]] = []
    tokens: list[int] | None = None

    def messages(self) -> list[dict[str, Any]]:
        """Return all messages so far in order, answers included."""
        found: list[dict[str, Any]] = []
        for messages, answer in self.said:
            found += msgspec.json.decode(messages, type=list[dict[str, Any]])
            found.append({"role": "assistant", "content": answer})
        return found


class Peek(Struct, frozen=True):
    """The fields of a chat's body that are read before the body is parsed."""

    session: str | None = None
    wait: bool = False
    response_format: Any = None


def peek(raw: bytes) -> Peek:
    """Return the first fields of a body; defaults for a faulty body, which `chat` then refuses."""
    try:
        return msgspec.json.decode(raw, type=Peek)
    except (ValueError, RecursionError):
        return Peek()


def chat(
    raw: bytes,
    specs: dict[str, Spec],
    default: str,
    scope: str,
    history: SessionHistory | None = None,
    *,
    low: bool = False,
) -> tuple[ChatRequest, GenerationSpec | None]:
    """Parse the body of POST /v1/chat/completions, and render and tokenize its prompt unless it asks for retrieval."""
    body = decode(raw, ChatBody)
    check_chat(body)
    named = specs[body.model].name if body.model in specs else body.model  # it may name an alias
    if history is not None and named not in (None, history.model):
        raise InvalidRequest(
            f"model is {body.model!r}: the session's model is {history.model!r}; leave model out",
            code="session_model_mismatch",
            param="model",
        )
    spec = choose(specs, history.model if history else body.model, default, ("generate",))
    ask = request_of(body, spec, scope, low=low)
    if ask.retrieval is None:
        return ask, generation(ask, spec, history)
    if ask.messages[-1]["role"] != "user":
        raise InvalidRequest(
            "messages: with retrieval the last one is the question; expected role user",
            code="invalid_value",
            param="messages",
        )
    return ask, None


def request_of(body: ChatBody, spec: Spec, scope: str, *, low: bool) -> ChatRequest:
    """Return the validated chat of a checked body."""
    wish = wish_of(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    options = options_of(
        body,
        spec,
        max_new=body.max_completion_tokens or body.max_tokens or 0,
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
        low=low,
    )
    form = _tool_format(spec, wish)
    free = not binds(body) and not (wish is not None and wish.required)
    reasoning = free and reasons(spec.chat_template)
    if form is not None or reasoning:
        shown = shown_ids(load(spec.path), form, reasoning=reasoning)
        options = msgspec.structs.replace(options, shown=shown)
    if wish is not None and form is not None and wish.bound:
        check_bound(body, "tools")
        options = msgspec.structs.replace(options, grammar=bound(wish, form, load(spec.path)))
    functions = wish.functions if wish is not None else []
    names = [each.name for each in functions]
    return ChatRequest(
        tools=rendered(functions),
        marks=AnswerMarks(form, names, "marked" if reasoning else ""),
        model=spec.name,
        scope=scope,
        messages=[plain(message, index) for index, message in enumerate(body.messages)],
        options=options,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        session=body.session or "",
        keep_partial=body.keep_partial,
        retrieval=_retrieval(body),
    )


def marks_of(ask: ChatRequest, made: GenerationSpec) -> AnswerMarks | None:
    """Return the marks of reasoning and calls in a chat's answer; None if the whole answer is content."""
    if made.thinks:
        return msgspec.structs.replace(ask.marks, reasoning="opened")
    return None if ask.marks == AnswerMarks() else ask.marks


def _tool_format(spec: Spec, wish: ToolWish | None) -> ToolFormat | None:
    """Return the format of an answer's calls, None without tools; InvalidRequest if the model cannot make the calls."""
    if wish is None:
        return None
    form = format_of(spec.chat_template)
    if form is None:
        why = f"the chat template of {spec.name} knows no tools, or a format that is not read here"
        raise InvalidRequest(f"tools: {why}; leave them out", code="unsupported", param="tools")
    if wish.bound and not spec.grammars:
        why = f"the workers of {spec.name} cannot bind an answer"
        raise InvalidRequest(
            f"tool_choice: {why}; expected auto, parallel and not strict",
            code="unsupported",
            param="tool_choice",
        )
    return form


def _retrieval(body: ChatBody) -> RetrievalOptions | None:
    asked = body.retrieval
    if asked is None:
        return None
    given = {
        name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None
    }
    stages = {"rewrite": _rewrite(asked), "rerank": _rerank(asked)}
    return RetrievalOptions(**{**given, **stages})


def _rewrite(asked: RetrievalBody) -> RewriteOptions | None:
    if not asked.rewrite:
        return None
    given = RewriteBody() if asked.rewrite is True else asked.rewrite
    return RewriteOptions(given.model or "", given.max_tokens, given.by)


def _rerank(asked: RetrievalBody) -> RerankOptions | None:
    if not asked.rerank:
        return None
    given = RerankOptionsBody() if asked.rerank is True else asked.rerank
    candidates = given.candidates or max(DEFAULT_CANDIDATES, asked.k)
    if candidates < asked.k:
        raise InvalidRequest(
            f"retrieval.rerank.candidates is {candidates}: expected at least k, {asked.k}",
            code="invalid_value",
            param="retrieval.rerank.candidates",
        )
    return RerankOptions(given.model or "", candidates)


def template_of(spec: Spec, tools: Tools = ()) -> Template:
    """Return a model's chat template, bounded by the model's context, for a chat with `tools`."""
    most = spec.max_tokens * CHARACTERS_PER_TOKEN
    return Template(spec.fingerprint, spec.chat_template, spec.bos, spec.eos, most, tools)


def chat_prompt(
    spec: Spec,
    messages: Messages,
    history: SessionHistory | None = None,
    tools: Tools = (),
) -> tuple[list[int], int]:
    """Return a chat's whole prompt as token ids, and the number of leading tokens that the session already has.

    A session's tokens stay as they were generated. If the template does more than append to the earlier prompt, the
    whole prompt is tokenized again, and the number is 0.
    """
    held, segments = prompt_segments(spec, messages, history, tools)
    encoder, tokens = load(spec.path), list(held)
    for text, written in segments:
        tokens += encoder.written(text) if written else encoder.bare(text)
    return tokens, len(held)


def prompt_segments(
    spec: Spec,
    messages: Messages,
    history: SessionHistory | None = None,
    tools: Tools = (),
) -> tuple[list[int], list[PromptSegment]]:
    """Return the leading tokens of a chat's prompt that the session already has, and the segments that follow them."""
    earlier = history.messages() if history else []
    together = [*earlier, *messages]
    if (
        sum(len(message["content"]) for message in together)
        > spec.max_tokens * CHARACTERS_PER_TOKEN
    ):
        raise overflow(
            spec.max_tokens,
            "your messages are far longer",
            "reduce the length of the messages",
            "messages",
        )
    encoder, template = load(spec.path), template_of(spec, tools)
    _check_special(encoder, together, tools)
    careful = encoder.holds_special(message["content"] for message in together)

    def rendered(some: Messages) -> list[PromptSegment]:
        return template.segments(some) if careful else [PromptSegment(template.render(some))]

    whole = rendered(together)
    if history is not None and earlier and history.tokens is not None:
        before = "".join(segment.text for segment in rendered(earlier[:-1]))
        rest = after(whole, before + earlier[-1]["content"])
        if rest is not None:
            return history.tokens, rest
    return [], whole


def generation(
    ask: ChatRequest,
    spec: Spec,
    history: SessionHistory | None = None,
    *,
    messages: Messages | None = None,
    forced: str | None = None,
    retrieval: dict[str, Any] | None = None,
    turn: SessionTurn | None = None,
    param: str = "messages",
    spans: Sequence[tuple[int, int]] = (),
) -> GenerationSpec:
    """Return the job of a chat; `messages`, if given, replace the request's messages, for instance to add passages.

    `retrieval` is the `retrieval` object that the session keeps. `forced` is an answer that is given instead of a
    computed one. `spans` are those of passages in the prompt that are computed alone. `spec` is this process' spec of
    `ask.model`. `turn` is the session's turn, if the messages include the session's history. Errors name `param`.
    """
    given = list(ask.messages if messages is None else messages)
    prompt, held = chat_prompt(spec, given, history, ask.tools)
    if history is not None:
        turn = SessionTurn(
            session=history.session,
            version=history.version,
            history=held,
            messages=msgspec.json.encode(given),
            shown=b"" if given == ask.messages else msgspec.json.encode(ask.messages),
            ttl_s=history.ttl_s,
            keep_partial=ask.keep_partial,
            retrieval=b"" if retrieval is None else msgspec.json.encode(retrieval),
        )
    answer = None if forced is None else load(spec.path).written(forced)
    made = generation_of(
        ask.options, spec, ask.scope, [prompt], turn=turn, forced=answer, param=param, spans=spans
    )
    if not ask.marks.reasoning:
        return made
    end = load(spec.path).decode(prompt[-8:]).rstrip()
    return made._replace(thinks=end.endswith(THINK))


def _check_special(encoder: TextEncoder, messages: Messages, tools: Tools) -> None:
    """Refuse tools, calls and reasoning that spell special tokens, since a template writes their texts out."""
    for message in messages:
        apart = [message.get("tool_calls"), message.get("reasoning_content")]
        if any(apart) and encoder.holds_special([json.dumps(apart, ensure_ascii=False)]):
            raise _spelt("messages", "a call or its reasoning")
    if tools and encoder.holds_special([json.dumps(list(tools), ensure_ascii=False)]):
        raise _spelt("tools", "a tool")


def _spelt(param: str, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: {where} spells a special token of the model; expected a text without one",
        code="invalid_messages",
        param=param,
    )
