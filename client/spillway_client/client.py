"""The client: one object, its groups of calls, and search and rerank at the top."""

from __future__ import annotations

import os
import ssl as ssl_module
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from . import errors
from ._chat import ChatResource, CompletionsResource
from ._collections import CollectionsResource, DocumentsResource, many_results, one_result, search
from ._resources import EmbeddingsResource, ModelsResource, RequestsResource, packed, reranking
from ._sessions import Session, SessionsResource
from ._transport import Transport
from .types import Reranking, SearchMode, SearchResult

DEFAULT_URL = "http://127.0.0.1:8080"


class AsyncSpillway:
    """A Spillway server as one object; use it as an async context manager, or `close()` it.

    `base_url` and `api_key` default to SPILLWAY_URL (else http://127.0.0.1:8080) and SPILLWAY_API_KEY. `base_url` may
    name several routers of one instance, in a list or separated by commas: if one is away, the next is asked.
    `timeout_s` is the deadline of each call in seconds (by default 60, and 600 for generations): it covers all tries,
    and the server drops work that cannot be done by then. After 408, 429, 5xx and broken connections up to
    `max_retries` further tries follow; the idempotency key attaches them to the work of the first try. `resume_s` is
    the number of seconds for which the server goes on with a request after the connection broke, so that a retry or a
    resumed stream finds it; cancelling the awaiting task ends the request at once. A client is for one event loop.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
        max_retries: int = 2,
        resume_s: float = 30.0,
        max_connections: int = 100,
        ssl: ssl_module.SSLContext | bool = True,
    ) -> None:
        self._transport = Transport(
            base_url or os.environ.get("SPILLWAY_URL") or DEFAULT_URL,
            api_key or os.environ.get("SPILLWAY_API_KEY"),
            timeout_s=timeout_s,
            max_retries=max_retries,
            resume_s=resume_s,
            max_connections=max_connections,
            ssl=ssl,
        )
        self.chat = ChatResource(self._transport)
        self.completions = CompletionsResource(self._transport)
        self.sessions = SessionsResource(self._transport)
        self.embeddings = EmbeddingsResource(self._transport)
        self.models = ModelsResource(self._transport)
        self.collections = CollectionsResource(self._transport)
        self.requests = RequestsResource(self._transport)

    @property
    def base_url(self) -> str:
        """The address of the server that gets the next call."""
        return self._transport.servers.now

    async def __aenter__(self) -> Self:
        self._transport.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; idempotent."""
        await self._transport.close()

    def session(self, id: str) -> Session:
        """Return the session with an id, for its calls; nothing is sent yet."""
        return Session(self._transport, id)

    def documents(self, collection: str) -> DocumentsResource:
        """Return the documents of a collection, for their calls; nothing is sent yet."""
        return DocumentsResource(self._transport, collection)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, str]],
        *,
        model: str | None = None,
        top_n: int | None = None,
        return_documents: bool = False,
        timeout_s: float | None = None,
    ) -> Reranking:
        """Order documents by their relevance to a query, best first."""
        if not documents:
            raise errors.InvalidInputError("documents is empty; expected at least one")
        body: dict[str, Any] = {"query": query, "documents": list(documents)}
        optional = {"model": model, "top_n": top_n, "return_documents": return_documents or None}
        body |= {name: value for name, value in optional.items() if value is not None}
        answer = await self._transport.call("POST", "/v1/rerank", body=body, timeout_s=timeout_s)
        return reranking(answer.payload, answer.request_id)

    async def search(
        self,
        collection: str,
        text: str | None = None,
        *,
        vector: Sequence[float] | None = None,
        k: int = 10,
        filter: Mapping[str, Any] | None = None,
        min_score: float | None = None,
        include_text: bool = True,
        include_metadata: bool = True,
        effort: int | Literal["exact"] | None = None,
        time_budget_ms: float | None = None,
        ef: int | None = None,
        exact: bool | None = None,
        after: Any = None,
        mode: SearchMode | None = None,
        mmr: Mapping[str, float] | None = None,
        include_scores: bool | None = None,
        include_lists: bool | None = None,
        partial: bool | None = None,
        timeout_s: float | None = None,
    ) -> SearchResult:
        """Return the `k` nearest chunks to a text or a vector.

        `filter` selects documents by metadata ({"year": {"$gte": 2020}}); `after` is the `applied` of a write that the
        search must see. `effort` is the part of the index to search: a number (of candidates or lists), or "exact" to
        compare with every vector; with `time_budget_ms` (milliseconds) the server uses the largest effort that is
        predicted to end in time. `ef` and `exact` are older spellings of an effort. `mode` "vector" compares vectors,
        "text" the words of texts, and "hybrid" both: it takes a text, and a vector beside it if you embed yourself.
        `mmr` ({"lambda": 0.5, "candidates": 50}) makes the hits differ from each other; `include_scores` adds the
        scores of each search to the hits, `include_lists` the inverted lists that were read to the report. A `partial`
        search is answered without the shards that cannot be reached, and the result names these.
        """
        query: dict[str, Any] = {"text": text, "vector": None if vector is None else packed(vector)}
        query = _query(query, mode)
        body = _search_body(
            query,
            k=k,
            include_text=include_text,
            include_metadata=include_metadata,
            filter=filter,
            min_score=min_score,
            effort=effort,
            time_budget_ms=time_budget_ms,
            ef=ef,
            exact=exact,
            after=after,
            mode=mode,
            mmr=mmr,
            include_scores=include_scores,
            include_lists=include_lists,
            partial=partial,
        )
        return one_result(await search(self._transport, collection, body, timeout_s))

    async def search_many(
        self,
        collection: str,
        texts: Sequence[str] | None = None,
        *,
        vectors: Sequence[Sequence[float]] | None = None,
        k: int = 10,
        filter: Mapping[str, Any] | None = None,
        min_score: float | None = None,
        include_text: bool = True,
        include_metadata: bool = True,
        effort: int | Literal["exact"] | None = None,
        time_budget_ms: float | None = None,
        ef: int | None = None,
        exact: bool | None = None,
        after: Any = None,
        mode: SearchMode | None = None,
        mmr: Mapping[str, float] | None = None,
        include_scores: bool | None = None,
        include_lists: bool | None = None,
        partial: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[SearchResult]:
        """Search for several texts or vectors in one request; results in the order of the queries."""
        query = _query(
            {
                "texts": None if texts is None else list(texts),
                "vectors": None if vectors is None else [packed(vector) for vector in vectors],
            },
            mode,
        )
        body = _search_body(
            query,
            k=k,
            include_text=include_text,
            include_metadata=include_metadata,
            filter=filter,
            min_score=min_score,
            effort=effort,
            time_budget_ms=time_budget_ms,
            ef=ef,
            exact=exact,
            after=after,
            mode=mode,
            mmr=mmr,
            include_scores=include_scores,
            include_lists=include_lists,
            partial=partial,
        )
        return many_results(await search(self._transport, collection, body, timeout_s))


def _query(fields: dict[str, Any], mode: SearchMode | None) -> dict[str, Any]:
    """Return the body's query fields: a text, a vector or several, or, in mode hybrid, a text and a vector."""
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) != 1 and not (mode == "hybrid" and len(given) == len(fields)):
        raise errors.InvalidInputError(f"expected exactly one of {' and '.join(fields)}")
    return given


def _search_body(
    query: dict[str, Any], *, k: int, include_text: bool, include_metadata: bool, **optional: Any
) -> dict[str, Any]:
    return {
        **query,
        "k": k,
        **({} if include_text else {"include_text": False}),
        **({} if include_metadata else {"include_metadata": False}),
        **{name: value for name, value in optional.items() if value is not None},
    }
