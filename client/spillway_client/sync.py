"""The blocking client: all calls of the async client, for scripts, notebooks and threads."""

from __future__ import annotations

import ssl as ssl_module
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

from ._collections import CollectionsResource, DocumentsResource
from ._portal import Bound, Portal, call, each
from ._resources import EmbeddingsResource, Input, ModelsResource, RequestsResource
from .client import AsyncSpillway
from .sync_generation import SyncChat, SyncCompletions, SyncSession, SyncSessions
from .types import Embeddings


class SyncEmbeddings(Bound[EmbeddingsResource]):
    """Texts to vectors."""

    @overload
    def create(
        self, input: Input, *, as_: Literal["list"] = "list", **options: Any
    ) -> Embeddings[list[float]]: ...

    @overload
    def create(
        self, input: Input, *, as_: Literal["bytes"], **options: Any
    ) -> Embeddings[bytes]: ...

    def create(
        self, input: Input, *, as_: Literal["list", "bytes"] = "list", **options: Any
    ) -> Embeddings[list[float]] | Embeddings[bytes]:
        """Embed a text, texts, or token lists; options and result as those of the async client."""
        if as_ == "bytes":
            return self._portal.run(self._inner.create(input, as_=as_, **options))
        return self._portal.run(self._inner.create(input, as_=as_, **options))


class SyncModels(Bound[ModelsResource]):
    """The models that the server offers."""

    get = call(ModelsResource.get)
    list = call(ModelsResource.list)


class SyncRequests(Bound[RequestsResource]):
    """State, events and cancellation of requests, by the request id that every answer has."""

    get = call(RequestsResource.get)
    cancel = call(RequestsResource.cancel)
    timeline = call(RequestsResource.timeline)
    events = each(RequestsResource.events)


class SyncCollections(Bound[CollectionsResource]):
    """Named sets of documents with their vectors."""

    create = call(CollectionsResource.create)
    get = call(CollectionsResource.get)
    explain = call(CollectionsResource.explain)
    tune = call(CollectionsResource.tune)
    tuning = call(CollectionsResource.tuning)
    cancel_tuning = call(CollectionsResource.cancel_tuning)
    delete = call(CollectionsResource.delete)
    reembed = call(CollectionsResource.reembed)
    shards = call(CollectionsResource.shards)
    split_shard = call(CollectionsResource.split_shard)
    move_shard = call(CollectionsResource.move_shard)
    drop_replica = call(CollectionsResource.drop_replica)
    reset_shard = call(CollectionsResource.reset_shard)
    set_replicas = call(CollectionsResource.set_replicas)
    map = call(CollectionsResource.map)
    place = call(CollectionsResource.place)
    list = call(CollectionsResource.list)


class SyncDocuments(Bound[DocumentsResource]):
    """The documents of one collection."""

    add = call(DocumentsResource.add)
    get = call(DocumentsResource.get)
    delete = call(DocumentsResource.delete)
    iterate = each(DocumentsResource.iterate)
    list = call(DocumentsResource.list)


class Spillway(Bound[AsyncSpillway]):
    """A Spillway server for blocking code; use it with `with`, or `close()` it. It takes AsyncSpillway's arguments.

    An unclosed client closes by itself once the program holds neither the client nor its groups of calls, sessions and
    streams. Its connections live in a thread of its own, so it works in plain scripts, in several threads at once, and
    in the thread of a running event loop (which then waits). Ctrl-C during a call ends the work at the server.
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
        inner = AsyncSpillway(
            base_url,
            api_key,
            timeout_s=timeout_s,
            max_retries=max_retries,
            resume_s=resume_s,
            max_connections=max_connections,
            ssl=ssl,
        )
        portal = Portal(inner.close)
        super().__init__(portal, inner)
        self.chat = SyncChat(portal, inner.chat.completions)
        self.completions = SyncCompletions(portal, inner.completions)
        self.sessions = SyncSessions(portal, inner.sessions)
        self.embeddings = SyncEmbeddings(portal, inner.embeddings)
        self.models = SyncModels(portal, inner.models)
        self.collections = SyncCollections(portal, inner.collections)
        self.requests = SyncRequests(portal, inner.requests)

    @property
    def base_url(self) -> str:
        """The address of the server that gets the next call."""
        return self._inner.base_url

    def session(self, id: str) -> SyncSession:
        """Return the session with an id, for its calls; nothing is sent yet."""
        return SyncSession(self._portal, self._inner.session(id))

    def documents(self, collection: str) -> SyncDocuments:
        """Return the documents of a collection, for their calls; nothing is sent yet."""
        return SyncDocuments(self._portal, self._inner.documents(collection))

    rerank = call(AsyncSpillway.rerank)
    search = call(AsyncSpillway.search)
    search_many = call(AsyncSpillway.search_many)

    def close(self) -> None:
        """Close all connections and end the thread; idempotent."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
