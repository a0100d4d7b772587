"""Chat and completions: whole answers, streams, and the rest of a stream that another process began."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from . import errors
from ._http import Call, answer_of
from ._stream import Chunks
from ._transport import GENERATION_TIMEOUT_S, Transport
from .generation import ChatCompletion, Completion, chat_completion, completion
from .streams import ChatStream, CompletionStream

Messages = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class SamplingOptions(TypedDict, total=False):
    """The options of both chat and completions; an absent option has the model's default.

    `timeout_s` is the generation's deadline in seconds (the client's, by default 600). The same `idempotency_key` finds
    the same generation again after the caller was restarted; `extra` is merged into the body. The whole answer matches
    `response_format`, in OpenAI's shape; `json_format(schema)` makes one.
    """

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    seed: int
    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    ignore_eos: bool
    response_format: Mapping[str, Any]
    extra: Mapping[str, Any]
    timeout_s: float
    idempotency_key: str


class ChatOptions(SamplingOptions, total=False):
    """The options of chat alone.

    `retrieval` grounds the answer in a collection: its name, or {"collection", "k", "filter", "min_score",
    "include_passages", "mode", "mmr", "rewrite", "rerank", "effort", "place", "precomputed", "interval", "stale",
    "late", "shift"}; `rewrite` and `rerank` are True or objects, and with an `interval` of tokens the passages are
    found anew while the answer is written. `session` is the id of a session: `messages` then hold only the new
    messages. A session answers one turn at a time: during a turn, another one waits with `wait`, else it gets
    ConflictError (`session_busy`). `keep_partial` keeps the answer so far of a cancelled or failed turn. `tools` are
    functions that the model may call, in OpenAI's shape; `ChatMessage.as_dict` makes the answer a message for the next
    request.
    """

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    retrieval: str | Mapping[str, Any]
    session: str
    wait: bool
    keep_partial: bool
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool


class CompletionOptions(SamplingOptions, total=False):
    """The options of completions alone; `echo` puts the prompt before the text."""

    logprobs: int
    echo: bool


def json_format(schema: Mapping[str, Any] | None = None, name: str = "answer") -> dict[str, Any]:
    """Return the `response_format` for JSON that matches a JSON Schema, or, without a schema, for any JSON object."""
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": name, "schema": dict(schema)}}


def as_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as a list; a text becomes one message of the user. InvalidInputError without a message."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    found = [messages] if isinstance(messages, Mapping) else list(messages)
    if not found:
        raise errors.InvalidInputError("messages is empty; expected at least one")
    return [dict(message) for message in found]


def _prepared(
    transport: Transport, path: str, body: dict[str, Any], options: Mapping[str, Any]
) -> tuple[Call, str]:
    """Return the call and its idempotency key."""
    given = {name: value for name, value in options.items() if value is not None}
    timeout_s = given.pop("timeout_s", None)
    key = given.pop("idempotency_key", None) or uuid.uuid4().hex
    extra = given.pop("extra", {})
    if isinstance(given.get("retrieval"), str):
        given["retrieval"] = {"collection": given["retrieval"]}
    streamed = body.get("stream", False)
    call = transport.prepared(
        "POST",
        path,
        body={**body, **given, **extra},
        headers={"Accept": "text/event-stream, application/json"} if streamed else None,
        timeout_s=timeout_s,
        default_s=GENERATION_TIMEOUT_S,
        idempotency_key=key,
    )
    return call, key


_STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


async def _begun(transport: Transport, call: Call, key: str) -> Chunks:
    source = Chunks(transport, call)
    async with transport.cancelling(key):
        await source.open()
    return source


def _resuming(
    transport: Transport, request_id: str, last_event_id: str | None, timeout_s: float | None
) -> Chunks:
    call = transport.prepared(
        "GET",
        "",
        headers={"Accept": "text/event-stream, application/json"},
        timeout_s=timeout_s,
        default_s=GENERATION_TIMEOUT_S,
    )
    return Chunks(transport, call, request_id=request_id, last_id=last_event_id)


class ChatCompletionsResource:
    """Answers to conversations."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @overload
    async def create(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion: ...

    @overload
    async def create(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> ChatStream: ...

    async def create(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion | ChatStream:
        """Answer a conversation: a text (one message of the user), one message, or a list of messages.

        With `stream` the answer comes in chunks; the call then returns when the server has begun to answer.
        """
        if stream:
            return await self.stream(messages, **options)
        body: dict[str, Any] = {"messages": as_messages(messages)}
        call, key = _prepared(self._transport, "/v1/chat/completions", body, options)
        async with self._transport.cancelling(key):
            answer = await self._transport.tries(call, answer_of)
        return chat_completion(answer.payload, answer.request_id)

    async def stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatStream:
        """Answer a conversation in chunks; returns when the server has accepted it."""
        body = {"messages": as_messages(messages), **_STREAMED}
        call, key = _prepared(self._transport, "/v1/chat/completions", body, options)
        return ChatStream(self._transport, await _begun(self._transport, call, key), key)

    async def resume(
        self,
        request_id: str,
        *,
        last_event_id: str | None = None,
        timeout_s: float | None = None,
    ) -> ChatStream:
        """Go on with a stream begun elsewhere, after `last_event_id` (None: from its beginning)."""
        source = _resuming(self._transport, request_id, last_event_id, timeout_s)
        await source.open()
        return ChatStream(self._transport, source)


class ChatResource:
    """Chat; `completions` has the calls, as in OpenAI's client."""

    def __init__(self, transport: Transport) -> None:
        self.completions = ChatCompletionsResource(transport)


class CompletionsResource:
    """Continuations of bare prompts."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @overload
    async def create(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        **options: Unpack[CompletionOptions],
    ) -> Completion: ...

    @overload
    async def create(
        self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> CompletionStream: ...

    async def create(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[CompletionOptions]
    ) -> Completion | CompletionStream:
        """Continue a text, token ids, or a list of either; with `stream` the answer comes in chunks."""
        if stream:
            return await self.stream(prompt, **options)
        call, key = _prepared(self._transport, "/v1/completions", {"prompt": prompt}, options)
        async with self._transport.cancelling(key):
            answer = await self._transport.tries(call, answer_of)
        return completion(answer.payload, answer.request_id)

    async def stream(
        self, prompt: Prompt, **options: Unpack[CompletionOptions]
    ) -> CompletionStream:
        """Continue a prompt in chunks; returns when the server has accepted it."""
        body = {"prompt": prompt, **_STREAMED}
        call, key = _prepared(self._transport, "/v1/completions", body, options)
        return CompletionStream(self._transport, await _begun(self._transport, call, key), key)

    async def resume(
        self,
        request_id: str,
        *,
        last_event_id: str | None = None,
        timeout_s: float | None = None,
    ) -> CompletionStream:
        """Go on with a stream begun elsewhere, after `last_event_id` (None: from its beginning)."""
        source = _resuming(self._transport, request_id, last_event_id, timeout_s)
        await source.open()
        return CompletionStream(self._transport, source)
