"""Key names: all keys of a job have its family's hash tag."""

from __future__ import annotations

from common.ids import Family, family_of

GROUP = "workers"
RETURNED = "returned"
COLLECTIONS, REMOVED = "{collections}:records", "{collections}:removed"
CHANGES = "{collections}:changes"
PLACEMENTS = "{collections}:placements"  # the placements of collections, by the collection's id
HOLDINGS = "{collections}:holdings"  # the shards in each vector_search process, by its replica
PLACING = "{collections}:placing"  # the lock of the one process that coordinates placements
TUNINGS = "{collections}:tunings"  # the last tuning of each collection, by the collection's id
QUANTIZERS = "{collections}:quantizers"  # the quantizer of each collection, by the collection's id
ROUTERS = "routers"  # the routers, scored by their last heartbeat
PROCESSES = "processes"  # the records of all processes, by service, host and process
MODELS = "models"  # the names of the models that have a card
API_KEYS = "keys"  # the ids of the API keys
SWEEP = "{sessions/0}:sweep"  # exists while one kv_store sweeps the sessions
CLAIMS = "idem:"  # the prefix of every idempotency claim


def tag(family: Family) -> str:
    """Return the hash tag `{name/partition}`."""
    return "{" + str(family) + "}"


def family_of_key(name: str) -> Family:
    """Return the family whose hash tag a key has; ValueError if the key has none."""
    return Family.parse(name[1:].partition("}")[0])


def model(name: str) -> str:
    """The card and the tokenizer of a model."""
    return f"model:{name}"


def api_key(key_id: str) -> str:
    """The record of an API key."""
    return "{key/" + key_id + "}:record"


def quota(key_id: str, quota_name: str) -> str:
    """The used part of one quota of an API key: `running`, `requests` or `tokens`."""
    return "{key/" + key_id + "}:" + quota_name


def use(family: Family) -> str:
    """Items and tokens that the lane of each class holds, changed only together with its entries."""
    return f"{tag(family)}:use"


def plan(family: Family) -> str:
    """The last planned batch of each class."""
    return f"{tag(family)}:plan"


def depths(family: Family) -> str:
    """Depths that the depth finder measured, by device and objective."""
    return f"{tag(family)}:depths"


def workers(family: Family) -> str:
    """Records of the workers of a family."""
    return f"{tag(family)}:workers"


def heart(family: Family, worker: str) -> str:
    """The heartbeat of a worker, which exists while the worker makes progress (TTL 5 s)."""
    return f"{tag(family)}:heart:{worker}"


def step(family: Family, worker: str) -> str:
    """The latest step of a worker of which a part was attended on the host, with a TTL: for operators."""
    return f"{tag(family)}:step:{worker}"


def lane(family: Family, cls: str) -> str:
    """One stream of jobs: `gpu`, `cpu`, or `w.<worker>`."""
    return f"{tag(family)}:lane:{cls}"


def room(family: Family) -> str:
    """The stream whose one entry wakes routers that wait for room in a family's lanes."""
    return f"{tag(family)}:room"


def dead(family: Family) -> str:
    """The stream of dead letters."""
    return f"{tag(family)}:dead"


def letters(family: Family) -> str:
    """The index of dead letters: job to the entries of its letters."""
    return f"{tag(family)}:letters"


def journals(family: Family) -> str:
    """The routers that have a journal in a family, scored by the time of their last registration."""
    return f"{tag(family)}:journals"


def journal(family: Family, router: str) -> str:
    """The notifications of one router in one family."""
    return f"{tag(family)}:journal:{router}"


def job(job_id: str) -> str:
    """The record of one job."""
    return f"{tag(family_of(job_id))}:job:{job_id}"


def log(job_id: str) -> str:
    """The events of one job, indexed from 0."""
    return f"{tag(family_of(job_id))}:log:{job_id}"


def control(job_id: str) -> str:
    """The messages to one job, by their number, and whether it is paused."""
    return f"{tag(family_of(job_id))}:control:{job_id}"


def inbox(family: Family) -> str:
    """The stream that names each job whose worker must look for messages or a cancel."""
    return f"{tag(family)}:inbox"


def seen(job_id: str) -> str:
    """The time, with a TTL, at which a client last asked for a request."""
    return f"{tag(family_of(job_id))}:seen:{job_id}"


def orphans(family: Family, router: str) -> str:
    """The resumable requests that a router answers for, each with the seconds it may run on without a reader."""
    return f"{tag(family)}:held:{router}"


def reembedding(collection: str) -> str:
    """The lock of a re-embedding, with a TTL: the request that holds it is the collection's only writer."""
    return "{collections}:reembed:" + collection


def quantizing(collection: str) -> str:
    """The lock, with a TTL, of the one process that trains a quantizer for a collection."""
    return "{collections}:quantizing:" + collection


def claimed(job_id: str) -> str:
    """The key of a request's idempotency claim."""
    return f"{tag(family_of(job_id))}:claimed:{job_id}"


def claim(tenant: str, key: str) -> str:
    """A tenant's idempotency key: the hash of its body, and its request."""
    return f"{CLAIMS}{tenant}:{key}"


def former(collection: str, shard: int, name: str) -> str:
    """A key of a shard in the layout of earlier versions, in which each shard was a family of its own."""
    return f"{tag(former_family(collection, shard))}:{name}"


def former_family(collection: str, shard: int) -> Family:
    """The family of a shard in the layout of earlier versions."""
    return Family(f"search.{collection}", shard)


def own(worker: str) -> str:
    """The class of a worker's own lane."""
    return f"w.{worker}"


def writes(family: Family, collection: str, shard: int) -> str:
    """The stream of a shard's writes, which every replica reads in order."""
    return f"{tag(family)}:writes:{collection}/{shard}"


def written(family: Family) -> str:
    """The stream that names a shard at each write to it; the streams of writes themselves decide."""
    return f"{tag(family)}:written"


def applied(family: Family, collection: str, shard: int) -> str:
    """The ids of the last writes that the replicas have applied and synced, by replica."""
    return f"{tag(family)}:applied:{collection}/{shard}"


def blocked(family: Family, collection: str, shard: int) -> str:
    """The reason why a shard's writes are not applied at present, with a TTL."""
    return f"{tag(family)}:blocked:{collection}/{shard}"


def sealed(family: Family, collection: str, shard: int) -> str:
    """The id of the last entry of a shard that was split: nothing is appended after it."""
    return f"{tag(family)}:sealed:{collection}/{shard}"


def snapshots(family: Family, collection: str, shard: int) -> str:
    """The ids of the last writes in the replicas' snapshots, by replica."""
    return f"{tag(family)}:snapshots:{collection}/{shard}"


def session(session_id: str) -> str:
    """The record of one session."""
    return f"{tag(family_of(session_id))}:session:{session_id}"


def turns(session_id: str) -> str:
    """The turns of one session, in order."""
    return f"{session(session_id)}:turns"


def held(session_id: str) -> str:
    """The worker that holds pages of one session, with a TTL."""
    return f"{session(session_id)}:held"


def jobs(session_id: str) -> str:
    """The requests of all jobs that ran for a session, by job; a deletion looks for the traces of each."""
    return f"{session(session_id)}:jobs"


INDEX = "{sessions/0}:index"  # when indexing of sessions began, and which older data are indexed
PINNED = "{sessions/0}:pinned"  # pinned sessions, scored by the time of pinning


def sessions(family: Family, tenant: str) -> str:
    """A tenant's sessions, scored by the time of their last turn."""
    return f"{tag(family)}:sessions:{tenant}"


def due(family: Family) -> str:
    """Sessions as `tenant/id`, scored by the time (ms) of the sweep's next check, which is never after their end."""
    return f"{tag(family)}:due"


def tenants(family: Family) -> str:
    """The tenants that have had sessions."""
    return f"{tag(family)}:tenants"


def prefixes(family: Family) -> str:
    """Prefix marks of prompts with the worker that holds the pages, scored by their expiry."""
    return f"{tag(family)}:prefixes"


def forgets(family: Family) -> str:
    """The stream of deleted sessions whose pages workers must forget."""
    return f"{tag(family)}:forgets"


def forgotten(family: Family, entry: str) -> str:
    """The pages that workers forgot because of one entry of `forgets`, by worker, with a TTL."""
    return f"{tag(family)}:forgotten:{entry}"


def forgotten_bell(family: Family, entry: str) -> str:
    """A list with one element for each answer in `forgotten`, with a TTL; a blocking read of it waits for answers."""
    return f"{forgotten(family, entry)}:bell"
