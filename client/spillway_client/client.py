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

    `base_url` and `api_key` default to SPILLWAY_URL (else http://127.0.0.1:8080) and SPILLWAY_API_KEY. Several
    routers of one instance may be given, in a list or separated by commas: another is asked when one is away.
    `timeout_s` is each call's deadline (60 s, and 600 s for generations, where it is not given): it covers all
    tries and is sent to the server, which drops work that cannot be done by then. `max_retries` further tries are
    made after 408, 429, 5xx and broken connections; they attach to the work of the first by its idempotency key.
    `resume_s` is how long the server keeps a request going when the connection breaks, for such a retry, or a
    stream that goes on, to find it; cancelling the awaiting task ends it at once.
    A client is for one event loop.
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
        """The address of the server that is asked now."""
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
        """Return a session to talk in (no call is made)."""
        return Session(self._transport, id)

    def documents(self, collection: str) -> DocumentsResource:
        """Return the documents of a collection (no call is made)."""
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

        `filter` restricts by metadata ({"year": {"$gte": 2020}}); `after` is the `applied` of a write that must
        be seen. `effort` is how much of the index to look at, "exact" compares with every vector; with `time_budget_ms`
        the largest effort is used that is predicted to end in time. `ef` and `exact` are older spellings of an effort.
        `mode` says what is compared: vectors, the words of texts, or both ("hybrid", which takes a text, and a vector
        beside it where you embed yourself). `mmr` ({"lambda": 0.5, "candidates": 50}) makes the hits differ from each
        other; `include_scores` asks for what each search gave a hit, `include_lists` for the inverted lists it read.
        A `partial` search is answered without the shards that cannot be reached, which the result names.
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
    """Return what is searched for: one of the fields, or in mode hybrid both."""
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
