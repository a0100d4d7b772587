"""Records of the registry and of workers."""

from __future__ import annotations

from typing import Literal

import msgspec

from common.wire.message import Message


class WorkerRecord(Message, frozen=True):
    """A worker's record in `{f}:workers`; depth bounds all its running and queued work.

    Predicted seconds of a batch = beta_s + alpha_items_s * items + alpha_tokens_s * tokens, of which `r2` says how
    much they explain. `limit_items` and `limit_tokens` are its largest batch, by which the door plans (0: it plans
    none). Of predictions 99.9 % are off by less than `late_s` seconds, and by less than `late_share` of themselves and
    a twentieth of `slo_s`. Without a deadline of its own a request should end within `slo_s` (0: by its deadline).
    `depth_queries` is the depth in queries of the count policies. A `closed` worker serves its own lane only. `batches`
    and `tokens` count what it ran since its start, the fields after them tell of the last batch; they are as old as the
    last heartbeat. `place` is where its process can be looked for; calls reach it at `address` (host:port, "" for none)
    with `token`, which no API shows.
    """

    worker: str
    classes: list[str]
    device: str
    depth_items: int
    depth_tokens: int
    alpha_items_s: float = 0.0
    alpha_tokens_s: float = 0.0
    beta_s: float = 0.0
    r2: float = 0.0
    limit_items: int = 0
    limit_tokens: int = 0
    late_s: float = 0.0
    late_share: float = 0.0
    slo_s: float = 0.0
    depth_queries: int = 0
    closed: bool = False
    fingerprint: str = ""
    draining: bool = False
    started_ms: int = 0
    pid: int = 0
    service: str = ""
    batches: int = 0
    tokens: int = 0
    batch_items: int = 0
    batch_tokens: int = 0
    batch_s: float = 0.0
    place: str = ""
    address: str = ""
    token: str = ""


class Held(Message, frozen=True):
    """The part of a session that a worker holds: tokens on its device and on its host only, and the last full page."""

    worker: str
    device_tokens: int
    host_tokens: int
    page: bytes
    at_ms: int


class Forgot(Message, frozen=True):
    """A worker's answer to a deleted session: page ids it looked for, and how many its device and its host had."""

    worker: str
    looked: int
    device: int
    host: int


class DepthRecord(Message, frozen=True):
    """Result of probing one device: seconds of n queries at once = beta_s + alpha_s * n, explained by `r2`.

    `by_line` is the depth by that line, `depth` after tuning; `points` are (queries, seconds of the last answer).
    """

    alpha_s: float
    beta_s: float
    r2: float
    slo_s: float
    by_line: int
    depth: int
    points: list[tuple[int, float]]
    at_ms: int = 0


class Chunking(msgspec.Struct, frozen=True):
    """Splitting of a collection's documents, in tokens of its encoder."""

    max_tokens: int = 200
    overlap_tokens: int = 32


class CollectionRecord(Message, frozen=True):
    """A collection as registered; `id` is new at every creation, so old writes never reach a new namesake."""

    id: str
    tenant: str
    name: str
    dimension: int
    metric: Literal["cosine", "dot", "l2"]
    model: str | None = None
    fingerprint: str = ""
    query_prompt: str = ""
    document_prompt: str = ""
    chunking: Chunking = Chunking()
    shards: int = 1
    created_ms: int = 0


class DeadLetter(Message, frozen=True):
    """A convicted job with what is needed to understand and to replay it."""

    job: str
    tenant: str
    payload: bytes
    items: int
    tokens: int
    code: str
    message: str
    trace: str
    attempts: int
    at_ms: int
