"""The groups of calls: embeddings, rerank, models, requests."""

from __future__ import annotations

import array
import base64
import binascii
import json
import math
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Literal, overload
from urllib.parse import quote

from . import errors
from ._sse import Frame, Parser
from ._transport import Transport
from .types import (
    Embedding,
    Embeddings,
    Model,
    Request,
    RequestEvent,
    RequestTimeline,
    Reranking,
    RerankResult,
    StageRun,
    UnexpectedResponseError,
    Usage,
    build,
    items,
)

Input = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
MAX_RECONNECTS = 5


def segment(text: str) -> str:
    """Return one path segment, with slashes escaped; InvalidInputError if empty."""
    if not text:
        raise errors.InvalidInputError("an id or name is empty")
    return quote(text, safe="")


def floats(data: bytes) -> list[float]:
    """Decode little-endian float32 bytes."""
    values = array.array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def packed(values: Iterable[float]) -> str:
    """Encode numbers as base64 of little-endian float32, which takes a tenth of the time of JSON numbers."""
    encoded = array.array("f", values)
    if not all(map(math.isfinite, encoded)):
        raise errors.InvalidInputError("a vector holds a number that is no finite float32")
    if sys.byteorder == "big":
        encoded.byteswap()
    return base64.b64encode(encoded).decode()


class EmbeddingsResource:
    """Texts to vectors."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @overload
    async def create(
        self,
        input: Input,
        *,
        model: str | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        as_: Literal["list"] = "list",
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Embeddings[list[float]]: ...

    @overload
    async def create(
        self,
        input: Input,
        *,
        model: str | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        as_: Literal["bytes"],
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Embeddings[bytes]: ...

    async def create(
        self,
        input: Input,
        *,
        model: str | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        as_: Literal["list", "bytes"] = "list",
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Embeddings[list[float]] | Embeddings[bytes]:
        """Embed a text, texts, or token lists, in the order given.

        The model's prompt with the name `prompt_name` is put before each text; without a name the model's default
        prompt, which most models do not have. `as_` "list" returns lists of floats, "bytes" little-endian float32
        (`numpy.frombuffer(v, "<f4")`); vectors travel as base64 in both cases.
        """
        if as_ not in {"list", "bytes"}:
            raise errors.InvalidInputError(f'as_ is {as_!r}; expected "list" or "bytes"')
        if not isinstance(input, str) and not input:
            raise errors.InvalidInputError("input is empty; expected a text or at least one")
        body: dict[str, Any] = {
            "input": input if isinstance(input, str) else list(input),
            "encoding_format": "base64",
        }
        body |= {
            k: v
            for k, v in {
                "model": model,
                "dimensions": dimensions,
                "prompt_name": prompt_name,
            }.items()
            if v is not None
        }
        answer = await self._transport.call(
            "POST",
            "/v1/embeddings",
            body=body,
            timeout_s=timeout_s,
            idempotency_key=idempotency_key,
        )
        rows = [(int(row["index"]), _vector(row)) for row in items(answer.payload)]
        rows.sort(key=lambda row: row[0])
        model_name = str(answer.payload.get("model", ""))
        usage = build(Usage, answer.payload.get("usage") or {})
        if as_ == "bytes":
            raw = [Embedding(index, vector) for index, vector in rows]
            return Embeddings(model_name, raw, usage, answer.request_id)
        decoded = [Embedding(index, floats(vector)) for index, vector in rows]
        return Embeddings(model_name, decoded, usage, answer.request_id)


def _vector(row: Any) -> bytes:
    value = row.get("embedding") if isinstance(row, dict) else None
    if isinstance(value, list):  # a proxy that knows no base64
        values = array.array("f", value)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()
    try:
        data = base64.b64decode(value or "", validate=True)
    except (TypeError, binascii.Error) as error:
        raise UnexpectedResponseError(f"an embedding is not base64: {error}") from error
    if not data or len(data) % 4:
        raise UnexpectedResponseError(
            f"an embedding has {len(data)} bytes; expected float32 values"
        )
    return data


class ModelsResource:
    """The models that the server offers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, timeout_s: float | None = None) -> list[Model]:
        """Return every model."""
        answer = await self._transport.call("GET", "/v1/models", timeout_s=timeout_s)
        return [build(Model, item, details=item) for item in items(answer.payload)]

    async def get(self, model: str, *, timeout_s: float | None = None) -> Model:
        """Return one model; NotFoundError if there is no model of this name."""
        path = f"/v1/models/{segment(model)}"
        answer = await self._transport.call("GET", path, timeout_s=timeout_s)
        return build(Model, answer.payload, details=answer.payload)


class RequestsResource:
    """State, events and cancellation of requests, by the request id that every answer has."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def get(self, request_id: str, *, timeout_s: float | None = None) -> Request:
        """Return a request's state, and its result or error if it has ended."""
        path = f"/v1/requests/{segment(request_id)}"
        answer = await self._transport.call("GET", path, timeout_s=timeout_s)
        return build(Request, answer.payload)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> Request:
        """Cancel a request; a request that has ended already keeps its state."""
        path = f"/v1/requests/{segment(request_id)}/cancel"
        answer = await self._transport.call("POST", path, timeout_s=timeout_s)
        return build(Request, {"id": request_id, "state": "cancelled", **(answer.payload or {})})

    async def timeline(self, request_id: str, *, timeout_s: float | None = None) -> RequestTimeline:
        """Return the times of a request's jobs (admitted, leased, ended), and the stages of a grounded answer."""
        path = f"/v1/requests/{segment(request_id)}/timeline"
        answer = await self._transport.call("GET", path, timeout_s=timeout_s)
        told = answer.payload.get("stages") if isinstance(answer.payload, dict) else None
        stages = [build(StageRun, one) for one in told or []]
        return build(RequestTimeline, answer.payload, stages=stages)

    async def events(
        self, request_id: str, *, after: int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[RequestEvent]:
        """Yield the events after index `after` until the last one; a broken connection is resumed in place.

        `timeout_s` bounds each connection in seconds.
        """
        last, breaks = after, 0
        while True:
            try:
                async for event in self._events(request_id, last, timeout_s):
                    last, breaks = event.index, 0
                    yield event
                return
            except errors.APITimeoutError:
                raise
            except errors.APIConnectionError:
                breaks += 1
                if breaks > MAX_RECONNECTS:
                    raise
                await self._transport.pause(breaks - 1)

    async def _events(
        self, request_id: str, after: int | None, timeout_s: float | None
    ) -> AsyncIterator[RequestEvent]:
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        path = f"/v1/requests/{segment(request_id)}/events"
        parser = Parser()
        async for data in self._transport.stream(path, headers=headers, timeout_s=timeout_s):
            for frame in parser.feed(data):
                if frame.data == "[DONE]":
                    return
                if frame.id is not None:
                    yield _event(frame.id, frame)


def _event(id: str, frame: Frame) -> RequestEvent:
    try:
        return RequestEvent(int(id), frame.event, json.loads(frame.data))
    except ValueError as error:
        raise UnexpectedResponseError(
            f"an event is neither indexed nor JSON: {frame!r:.200}; the stream of a chat or a"
            " completion is read with `resume`"
        ) from error


def reranking(payload: Any, request_id: str | None) -> Reranking:
    """Decode a Cohere-shaped answer."""
    results = [
        build(RerankResult, item, text=(item.get("document") or {}).get("text"))
        for item in items(payload, "results")
    ]
    return build(Reranking, {"model": "", **payload}, results=results, request_id=request_id)
