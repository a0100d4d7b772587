"""Chats: a body is parsed into messages and options; messages and history are rendered into a whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from common.errors import InvalidRequest
from common.wire.sessions import SessionTurn
from common.wire.workflows import ChatRequest, RetrievalOptions
from services.router.text.bodies import decode
from services.router.text.generation_bodies import ChatBody, check_chat, plain
from services.router.text.generations import GenerationSpec, generation_of, options_of
from services.router.text.overflow import BYTES_PER_TOKEN, overflow
from services.router.text.requests import choose
from services.router.text.templates import Messages, PromptSegment, Template, after
from services.router.text.tokens import Spec, load


class SessionHistory(Struct, frozen=True):
    """A session at the time it was read, with all that rendering and tokenizing its next turn needs.

    `said` holds each turn's messages (a JSON list, as rendered) and answer; `tokens` is all of it in tokens, None where
    it must be tokenized anew.
    """

    session: str
    version: int
    model: str
    ttl_s: int
    said: list[tuple[bytes, str]] = []
    tokens: list[int] | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return all messages so far, the last answer last."""
        found: list[dict[str, str]] = []
        for messages, answer in self.said:
            found += msgspec.json.decode(messages, type=list[dict[str, str]])
            found.append({"role": "assistant", "content": answer})
        return found


class Peek(Struct, frozen=True):
    """The fields of a chat's body that are read before the body is parsed."""

    session: str | None = None
    wait: bool = False


def peek(raw: bytes) -> Peek:
    """Return the session fields of a body; defaults for a faulty body, which `chat` then refuses."""
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
    named = specs[body.model].name if body.model in specs else body.model  # it may be an alias
    if history is not None and named not in (None, history.model):
        raise InvalidRequest(
            f"model is {body.model!r}: the session's model is {history.model!r}; leave model out",
            code="session_model_mismatch",
            param="model",
        )
    spec = choose(specs, history.model if history else body.model, default, ("generate",))
    ask = _request(body, spec, scope, low=low)
    if ask.retrieval is None:
        return ask, generation(ask, spec, history)
    if ask.messages[-1]["role"] != "user":
        raise InvalidRequest(
            "messages: with retrieval the last one is the question; expected role user",
            code="invalid_value",
            param="messages",
        )
    return ask, None


def _request(body: ChatBody, spec: Spec, scope: str, *, low: bool) -> ChatRequest:
    return ChatRequest(
        model=spec.name,
        scope=scope,
        messages=[plain(message, index) for index, message in enumerate(body.messages)],
        options=options_of(
            body,
            spec,
            max_new=body.max_completion_tokens or body.max_tokens or 0,
            logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
            low=low,
        ),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        session=body.session or "",
        keep_partial=body.keep_partial,
        retrieval=_retrieval(body),
    )


def _retrieval(body: ChatBody) -> RetrievalOptions | None:
    if body.retrieval is None:
        return None
    given = msgspec.structs.asdict(body.retrieval)
    return RetrievalOptions(**{**given, "mode": body.retrieval.mode or "vector"})


def template_of(spec: Spec) -> Template:
    """Return a model's chat template, bounded by the model's context."""
    most = spec.max_tokens * BYTES_PER_TOKEN
    return Template(spec.fingerprint, spec.chat_template, spec.bos, spec.eos, most)


def chat_prompt(
    spec: Spec, messages: Messages, history: SessionHistory | None = None
) -> tuple[list[int], int]:
    """Return a chat's whole prompt as token ids, and the number of leading tokens that its session has already.

    A session's tokens stay as they were generated; where the template does not merely append, everything is rendered
    and tokenized anew and that count is 0.
    """
    earlier = history.messages() if history else []
    together = [*earlier, *messages]
    if sum(len(message["content"]) for message in together) > spec.max_tokens * BYTES_PER_TOKEN:
        raise overflow(
            spec.max_tokens,
            "your messages are far longer",
            "reduce the length of the messages",
            "messages",
        )
    encoder, template = load(spec.path), template_of(spec)
    careful = encoder.holds_special(message["content"] for message in together)

    def rendered(some: Messages) -> list[PromptSegment]:
        return template.segments(some) if careful else [PromptSegment(template.render(some))]

    def tokens(segments: Sequence[PromptSegment]) -> list[int]:
        found: list[int] = []
        for text, written in segments:
            found += encoder.written(text) if written else encoder.bare(text)
        return found

    whole = rendered(together)
    if history is not None and earlier and history.tokens is not None:
        before = "".join(segment.text for segment in rendered(earlier[:-1]))
        rest = after(whole, before + earlier[-1]["content"])
        if rest is not None:
            return history.tokens + tokens(rest), len(history.tokens)
    return tokens(whole), 0


def generation(
    ask: ChatRequest,
    spec: Spec,
    history: SessionHistory | None = None,
    *,
    messages: Messages | None = None,
    forced: str | None = None,
    retrieval: dict[str, Any] | None = None,
) -> GenerationSpec:
    """Return the job of a chat: `messages` replace those of the request where passages were put into them.

    `retrieval` is what the session keeps of those passages. `forced` is an answer to give instead of computing one.
    `spec` is this process' own of `ask.model`.
    """
    given = list(ask.messages if messages is None else messages)
    prompt, held = chat_prompt(spec, given, history)
    turn = None
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
    return generation_of(
        ask.options, spec, ask.scope, [prompt], turn=turn, forced=answer, param="messages"
    )
