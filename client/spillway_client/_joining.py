"""The joining of a stream's chunks into a whole answer."""

from __future__ import annotations

from typing import Any

from .generation import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    Citation,
    Completion,
    CompletionChoice,
    TokenUsage,
    ToolCall,
    joined_retrieval,
)


def joined_logprobs(parts: list[Any]) -> Any:
    """Join the logprobs of chunks (lists under the same names) into one object; None if no chunk has any."""
    whole: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part.items() if isinstance(part, dict) else ():
            if isinstance(values, list):
                whole.setdefault(name, []).extend(values)
    return whole or None


def whole_chat(
    chunks: list[ChatChunk], last: ChatChunk | None, request_id: str | None
) -> ChatCompletion:
    """Join all chunks of a stream into the whole answer."""
    texts: dict[int, list[str]] = {}
    cited: dict[int, list[Citation]] = {}
    calls: dict[int, list[ToolCall]] = {}
    thoughts: dict[int, list[str]] = {}
    finish: dict[int, str | None] = {}
    logs: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts.setdefault(choice.index, []).append(choice.delta.content)
            cited.setdefault(choice.index, []).extend(choice.delta.citations)
            calls.setdefault(choice.index, []).extend(choice.delta.tool_calls)
            thoughts.setdefault(choice.index, []).append(choice.delta.reasoning)
            logs.setdefault(choice.index, []).append(choice.logprobs)
            finish[choice.index] = choice.finish_reason or finish.get(choice.index)
    choices = [
        ChatChoice(
            index,
            ChatMessage(
                "assistant",
                "".join(texts[index]),
                cited[index],
                calls[index],
                "".join(thoughts[index]),
            ),
            finish[index],
            joined_logprobs(logs[index]),
        )
        for index in sorted(texts)
    ]
    first = chunks[0] if chunks else ChatChunk("", "", 0, [])
    found = joined_retrieval(chunk.retrieval for chunk in chunks)
    return ChatCompletion(
        first.id,
        first.model,
        first.created,
        choices,
        (last.usage if last else None) or TokenUsage(),
        found,
        last.details.get("session") if last else None,
        request_id,
    )


def whole_completion(
    chunks: list[Completion], last: Completion | None, request_id: str | None
) -> Completion:
    """Join all chunks of a stream into the whole completion."""
    texts: dict[int, list[str]] = {}
    finish: dict[int, str | None] = {}
    logs: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts.setdefault(choice.index, []).append(choice.text)
            logs.setdefault(choice.index, []).append(choice.logprobs)
            finish[choice.index] = choice.finish_reason or finish.get(choice.index)
    choices = [
        CompletionChoice(i, "".join(texts[i]), finish[i], joined_logprobs(logs[i]))
        for i in sorted(texts)
    ]
    first = chunks[0] if chunks else Completion("", "", 0, [])
    used = last.usage if last else None
    return Completion(first.id, first.model, first.created, choices, used, request_id)
