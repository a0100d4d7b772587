"""Records of the registry and of workers."""

from __future__ import annotations

from typing import Literal

import msgspec

from common.wire.message import Message


class WorkerRecord(Message, frozen=True):
    """A worker's record in `{f}:workers`; its depth bounds its running and queued work.

    Predicted seconds of a batch = beta_s + alpha_items_s * items + alpha_tokens_s * tokens; `r2` is the share of the
    measured variance that this line explains. `limit_items` and `limit_tokens` are the largest batch that admission
    plans (0: it plans no batches). 99.9 % of predictions are late by less than `late_s` seconds, and by less than
    `late_share` of themselves and a twentieth of `slo_s`. A request without a deadline of its own should end within
    `slo_s` (0: by its deadline). `depth_queries` is the depth in queries of the count policies. A `closed` worker
    serves its own lane only. `batches` and `tokens` count the work since the worker's start, and the fields after them
    describe the last batch; all are as old as the last heartbeat. `place` identifies the worker's process; calls reach
    it at `address` (host:port, "" for none) with `token`, which no API shows. `replica` names the files of a
    vector_search process, the same at every start.
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
    """A process of the mesh: its service, its machine, and its settings.

    `place` is the same as in the process' worker records. `cores` counts the cores that it may use, `threads` its
    computing threads. `settings` are the variables that differ from their defaults, without paths and addresses;
    `seen_ms` is the time of the process' last sign of life.
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
    """A stage of a step: name, sub-batch, layer, begin and end, in seconds since the first stage began."""

    stage: str
    part: int
    layer: int
    begin_s: float
    end_s: float


class StepRecord(Message, frozen=True):
    """A worker's latest step of which a part was attended on the host (NEO), as planned and as computed.

    `why` is the reason for the step's plan; `decoded` counts its rows that decode, `on_host` those of them attended on
    the host, and `host_share` is the latter's share since the start. `long_slack_s` and `short_slack_s` are the seconds
    by which, in the plan, the host ends before the device in either half of a layer; `device_idle_s` and `host_idle_s`
    are the seconds without computing. `stages` are those of the first layers. `resumed` counts prompts since the start
    by the treatment of their pages that only the host had.
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
    """A worker's part of a session: the tokens on its device, those on its host only, and the last full page."""

    worker: str
    device_tokens: int
    host_tokens: int
    page: bytes
    at_ms: int


class Forgot(Message, frozen=True):
    """A worker's answer to a deleted session: the numbers of pages looked for, and found on device and on host."""

    worker: str
    looked: int
    device: int
    host: int


class DepthRecord(Message, frozen=True):
    """The result of probing one device: n queries at once take beta_s + alpha_s * n seconds; `r2` is the fit.

    `by_line` is the depth by that line, `depth` the depth after tuning; `points` are (queries, seconds of the last
    answer).
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

    The shards of a `placed` collection are in its CollectionPlacement; any other collection has `shards` shards, which
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

    A replica in the state "new" begins empty, as its shard does. A "filling" one is copied from a serving one; once it
    serves, it takes the place of the replica `replaces`.
    """

    name: str
    state: Literal["new", "filling", "serving"]
    replaces: str = ""


class ShardSplit(msgspec.Struct, frozen=True):
    """A split in progress: the children `numbers` get the hashes below `at` and from `at` on.

    The replicas `ready` have both children in step.
    """

    at: int
    numbers: tuple[int, int]
    ready: list[str] = []


class PlacedShard(msgspec.Struct, frozen=True):
    """A shard that holds the documents with hashes from `low` to below `high`; its number is never used again.

    `ancestors` are the shards from which splits made it, the oldest first; its own stream begins after `begins`.
    """

    number: int
    low: int
    high: int
    replicas: list[PlacedReplica]
    ancestors: list[int] = []
    begins: str = "0-0"
    split: ShardSplit | None = None


class CollectionPlacement(Message, frozen=True):
    """The places of a collection's shards; `replicas` is the wanted number of replicas of each.

    `version` rises with every change, `layout` whenever shards replace others.
    """

    collection: str
    shards: list[PlacedShard]
    replicas: int = 1
    next_number: int = 1
    version: int = 1
    layout: int = 0


class QuantizerRecord(Message, frozen=True):
    """The quantizer of a collection: `version` is the blake2b of its content, in hexadecimal digits.

    `asked` is the number of lists requested at its training, `trainer` the replica whose process trained it.
    """

    collection: str
    version: str
    asked: int
    trainer: str


class HeldShard(msgspec.Struct, frozen=True):
    """A shard in a process: its vectors, its bytes on the disk, and the reason why it is not complete ("": it is)."""

    collection: str
    number: int
    rows: int
    bytes: int
    why: str = ""


class Holding(Message, frozen=True):
    """The shards of one vector_search process, and the bytes of memory that it may use; reported after changes."""

    replica: str
    memory_bytes: int
    shards: list[HeldShard] = []


class DeadLetter(Message, frozen=True):
    """A convicted job, with its error, trace and payload, to understand and to replay it."""

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
