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
    with `token`, which no API shows. `replica` names the files of a vector_search process, the same at every start.
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
    replica: str = ""


class ProcessRecord(Message, frozen=True):
    """A process of the mesh: what it is, where it runs, and how it was set.

    `place` is that of the process' worker records. `cores` are those it may run on, `threads` those that compute.
    `settings` are the variables that are not as by default, without paths and addresses; `seen_ms` is when the process
    last said that it lives.
    """

    service: str
    instance: str
    host: str
    pid: int
    place: str = ""
    cores: int = 0
    threads: int = 0
    settings: dict[str, str] = {}
    started_ms: int = 0
    seen_ms: int = 0


class StageSpan(msgspec.Struct, frozen=True, array_like=True):
    """A stage of a step: its name, sub-batch and layer, and when it began and ended, in seconds since the first one."""

    stage: str
    part: int
    layer: int
    begin_s: float
    end_s: float


class StepRecord(Message, frozen=True):
    """A worker's latest step of which a part was attended on the host (NEO), as planned and as computed.

    `why` is what decided where it was computed; `decoded` are its rows that decode, `on_host` those attended on the
    host, `host_share` their share since the start. `long_slack_s` and `short_slack_s` are the seconds by which the plan
    has the host done before the device in either half of a layer, the idle ones those in which a side computed nothing.
    `stages` are those of the first layers. `resumed` counts prompts since the start by what became of their pages that
    only the host had.
    """

    at_ms: int
    why: str
    decoded: int
    on_host: int
    host_share: float
    predicted_s: float
    measured_s: float
    long_slack_s: float
    short_slack_s: float
    device_idle_s: float
    host_idle_s: float
    layers: int
    stages: list[StageSpan] = []
    resumed: dict[str, int] = {}


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
    """A collection as registered; `id` is new at every creation, so old writes never reach a new namesake.

    A `placed` one has a CollectionPlacement, which says what its shards are; another one has `shards` of them, which
    every process holds.
    """

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
    placed: bool = False


class PlacedReplica(msgspec.Struct, frozen=True):
    """A copy of a shard, by the name of its process' files.

    A new one begins empty, as the shard does; one that is filling is copied from a serving one, and takes the place of
    the replica `replaces` when it serves.
    """

    name: str
    state: Literal["new", "filling", "serving"]
    replaces: str = ""


class ShardSplit(msgspec.Struct, frozen=True):
    """A split in progress: the children `numbers` get the hashes below and from `at`.

    The replicas `ready` have both children in step; no write comes after the entry `seal`, once there is one.
    """

    at: int
    numbers: tuple[int, int]
    ready: list[str] = []
    seal: str = ""


class PlacedShard(msgspec.Struct, frozen=True):
    """A shard that holds the documents with hashes from `low` to below `high`; its number is never used again.

    `ancestors` are the shards that it came from by splits, the oldest first; its own stream begins after `begins`.
    """

    number: int
    low: int
    high: int
    replicas: list[PlacedReplica]
    ancestors: list[int] = []
    begins: str = "0-0"
    split: ShardSplit | None = None


class CollectionPlacement(Message, frozen=True):
    """Where the shards of a collection live; `replicas` is how many of each are wanted.

    `version` rises with every change, `layout` when shards take the place of others.
    """

    collection: str
    shards: list[PlacedShard]
    replicas: int = 1
    next_number: int = 1
    version: int = 1
    layout: int = 0


class QuantizerRecord(Message, frozen=True):
    """The quantizer of a collection: `version` is the blake2b of what it consists of, in hexadecimal digits.

    `asked` is how many lists its training was asked for, `trainer` the replica whose process trained it.
    """

    collection: str
    version: str
    asked: int
    trainer: str


class HeldShard(msgspec.Struct, frozen=True):
    """A shard in a process: its vectors, its bytes on the disk, and why it is not complete, if it is not."""

    collection: str
    number: int
    rows: int
    bytes: int
    why: str = ""


class Holding(Message, frozen=True):
    """What one vector_search process holds, and the bytes of memory that it may use; reported when it changes."""

    replica: str
    memory_bytes: int
    shards: list[HeldShard] = []


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
