"""Key names: everything a job touches lies under its family's hash tag."""

from __future__ import annotations

from common.ids import Family, family_of

GROUP = "workers"
RETURNED = "returned"
COLLECTIONS, REMOVED = "{collections}:records", "{collections}:removed"
CHANGES = "{collections}:changes"
ROUTERS = "routers"  # the routers, scored by their last heartbeat
MODELS = "models"  # the names of the models that have a card
API_KEYS = "keys"  # the ids of the API keys
SWEEP = "{sessions/0}:sweep"  # exists while one kv_store sweeps the sessions
CLAIMS = "idem:"  # begins every idempotency claim


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
    """Items and tokens per class, changed only with the entries."""
    return f"{tag(family)}:use"


def plan(family: Family) -> str:
    """The last planned batch of each class."""
    return f"{tag(family)}:plan"


def depths(family: Family) -> str:
    """Depths that the depth estimator found, by device and objective."""
    return f"{tag(family)}:depths"


def workers(family: Family) -> str:
    """Records of the workers of a family."""
    return f"{tag(family)}:workers"


def heart(family: Family, worker: str) -> str:
    """Exists while a worker makes progress (TTL 5 s)."""
    return f"{tag(family)}:heart:{worker}"


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
    """Job to entry, of every dead letter: what finds a job's letter without reading all."""
    return f"{tag(family)}:letters"


def journals(family: Family) -> str:
    """The routers that listen in a family, scored by when they last said so."""
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


def seen(job_id: str) -> str:
    """Exists while somebody came back for a request not long ago."""
    return f"{tag(family_of(job_id))}:seen:{job_id}"


def orphans(family: Family, router: str) -> str:
    """The resumable requests that a router answers for, each with the seconds it may run on without a reader."""
    return f"{tag(family)}:held:{router}"


def reembedding(collection: str) -> str:
    """The request that re-embeds a collection, with a TTL: nobody else writes to the collection meanwhile."""
    return "{collections}:reembed:" + collection


def claimed(job_id: str) -> str:
    """The key of the idempotency claim that a request was made under."""
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
    """A shard's writes, read in order by every replica."""
    return f"{tag(family)}:writes:{collection}/{shard}"


def written(family: Family) -> str:
    """The stream that names a shard whenever something is written to it; the writes themselves are the truth."""
    return f"{tag(family)}:written"


def applied(family: Family, collection: str, shard: int) -> str:
    """Replica to the id it has applied and synced."""
    return f"{tag(family)}:applied:{collection}/{shard}"


def blocked(family: Family, collection: str, shard: int) -> str:
    """The reason for which a shard's writes are not applied at present, with a TTL."""
    return f"{tag(family)}:blocked:{collection}/{shard}"


def snapshots(family: Family, collection: str, shard: int) -> str:
    """Replica to the id its snapshot covers."""
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
    """Job to request, of everything that was run for a session: what a deletion must look for."""
    return f"{session(session_id)}:jobs"


INDEX = "{sessions/0}:index"  # since when everything of a session is indexed, and what has been
PINNED = "{sessions/0}:pinned"  # sessions whose pages stay, by when they were pinned


def sessions(family: Family, tenant: str) -> str:
    """A tenant's sessions by the time of their last turn."""
    return f"{tag(family)}:sessions:{tenant}"


def due(family: Family) -> str:
    """Sessions as `tenant/id`, by when (ms) to look whether they have ended; not after they have."""
    return f"{tag(family)}:due"


def tenants(family: Family) -> str:
    """The tenants that have had sessions."""
    return f"{tag(family)}:tenants"


def prefixes(family: Family) -> str:
    """Marks of prompts by worker, scored by when they expire."""
    return f"{tag(family)}:prefixes"


def forgets(family: Family) -> str:
    """The stream of deleted sessions whose pages workers must forget."""
    return f"{tag(family)}:forgets"


def forgotten(family: Family, entry: str) -> str:
    """Worker to what it forgot by one entry of `forgets`, with a TTL."""
    return f"{tag(family)}:forgotten:{entry}"


def forgotten_bell(family: Family, entry: str) -> str:
    """A list with one element for each answer in `forgotten`, with a TTL: whoever waits for answers reads it."""
    return f"{forgotten(family, entry)}:bell"
