"""What the whole mesh must agree on: model cards, collections, idempotency claims, dead letters."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence

from common.bus import keys, unreadable
from common.bus.admission import Door
from common.bus.workers import hash_of
from common.errors import Conflict
from common.ids import Family, family_of, ulid
from common.wire.messages import CollectionRecord, DeadLetter, ModelCard, decode, encode

CLAIM_S = 24 * 3600
BODY_HASH_BYTES = 16
LETTERS = 20  # read at once: a letter holds its job
COLLECTIONS, REMOVED = "{collections}:records", "{collections}:removed"
CHANGES = "{collections}:changes"


class Registry(Door):
    """Records outside any family, each change one plain command."""

    async def publish_card(self, card: ModelCard, tokenizer: bytes) -> None:
        """Publish a model's card with its tokenizer.json."""
        packed = zlib.compress(tokenizer, 1)
        await self.call("HSET", f"model:{card.name}", "card", encode(card), "tokenizer", packed)
        await self.call("SADD", "models", card.name)

    async def cards(self) -> dict[str, ModelCard]:
        """Return every model's card by name."""
        found = {}
        for name in sorted(await self.call("SMEMBERS", "models")):
            raw = await self.call("HGET", f"model:{name.decode()}", "card")
            if raw is not None:
                found[name.decode()] = decode(raw, ModelCard)
        return found

    async def tokenizer(self, name: str) -> bytes:
        """Return a model's tokenizer.json; KeyError if there is no such card."""
        raw = await self.call("HGET", f"model:{name}", "tokenizer")
        if raw is None:
            raise KeyError(name)
        return zlib.decompress(raw)

    # -- idempotency -----------------------------------------------------------------------------------

    async def claim(self, tenant: str, key: str, body_hash: bytes, request: str) -> str:
        """Claim (tenant, key) for `request` for 24 h; return the request to use: an earlier one's for the same body.

        Conflict (409 `idempotency_conflict`) if the key was used with another body.
        """
        name, mine = keys.claim(tenant, key), body_hash + request.encode()
        # First: a claim that its request does not name would outlive the request's session.
        await self.call("SET", keys.claimed(request), name, "EX", CLAIM_S + 60)
        stored: bytes = await self.script("claim", [name], [mine, CLAIM_S])
        if stored[len(body_hash) :] != request.encode():
            await self.call("DEL", keys.claimed(request))
        if stored[: len(body_hash)] != body_hash:
            raise Conflict(
                "Idempotency-Key was used with another body; use a new key for a new request",
                code="idempotency_conflict",
            )
        return stored[len(body_hash) :].decode()

    async def claimed(self, tenant: str, key: str) -> str | None:
        """Return the request that (tenant, key) was claimed for, or None."""
        stored = await self.call("GET", keys.claim(tenant, key))
        return None if stored is None else str(stored[BODY_HASH_BYTES:].decode())

    async def unclaim(self, tenant: str, key: str, request: str) -> None:
        """Release a claim whose request was refused at the door."""
        await self.script("unclaim", [keys.claim(tenant, key)], [request])
        await self.call("DEL", keys.claimed(request))

    # -- collections -----------------------------------------------------------------------------------

    async def create_collection(self, record: CollectionRecord) -> bool:
        """Register a collection; False if the tenant has one of that name."""
        field = f"{record.tenant}/{record.name}"
        if await self.call("HSETNX", COLLECTIONS, field, encode(record)):
            await self.collections_changed()
            return True
        stored = await self.collection(record.tenant, record.name)
        return stored is not None and stored.id == record.id  # the reply to an earlier try was lost

    async def collection(self, tenant: str, name: str) -> CollectionRecord | None:
        """Return a tenant's collection, or None."""
        raw = await self.call("HGET", COLLECTIONS, f"{tenant}/{name}")
        return None if raw is None else decode(raw, CollectionRecord)

    async def collections(self, tenant: str | None = None) -> list[CollectionRecord]:
        """Return a tenant's collections, or all, by name."""
        rows = hash_of(await self.call("HGETALL", COLLECTIONS))
        records = [decode(raw, CollectionRecord) for _, raw in sorted(rows.items())]
        return [r for r in records if tenant is None or r.tenant == tenant]

    async def replace_collection(self, old: CollectionRecord, new: CollectionRecord) -> bool:
        """Let the name of `old` mean `new`, and remember that `old` is gone; False if it means another by now."""
        swapped = await self._swap(old, new)
        await self.collections_changed()
        return swapped

    async def remove_collection(self, record: CollectionRecord) -> None:
        """Unregister a collection and remember its id, so that no replica brings it back."""
        await self.call("SADD", REMOVED, record.id)
        await self._swap(record, None)
        await self.collections_changed()

    async def _swap(self, old: CollectionRecord, new: CollectionRecord | None) -> bool:
        """Compare and set: a name that means `old` means `new` from now on, or nothing; False if it means another."""
        field, value = f"{old.tenant}/{old.name}", encode(new) if new is not None else b""
        tried = False
        while True:  # each repetition is another process' change of the record
            raw = await self.call("HGET", COLLECTIONS, field)
            found = decode(raw, CollectionRecord).id if raw is not None else None
            if tried and found == (new.id if new is not None else None):
                return True  # the reply to an earlier try was lost
            if found != old.id:
                return False
            if await self.script("swap", [COLLECTIONS, REMOVED], [field, raw, value, old.id]):
                return True
            tried = True

    async def unname_collection(self, record: CollectionRecord) -> None:
        """Let the name of a collection mean none; it lives on under another one."""
        await self.call("HDEL", COLLECTIONS, f"{record.tenant}/{record.name}")
        await self.collections_changed()

    async def collections_changed(self) -> None:
        """Say that the collections were changed, after they were: replicas read them again."""
        await self.call("SET", CHANGES, ulid())

    async def collection_changes(self) -> bytes | None:
        """Return a mark that is another one after each change of the collections; None if there is none yet."""
        raw: bytes | None = await self.call("GET", CHANGES)
        return raw

    async def removed_collections(self) -> set[str]:
        """Return the ids of collections that were removed."""
        return {item.decode() for item in await self.call("SMEMBERS", REMOVED)}

    # -- dead letters ----------------------------------------------------------------------------------

    async def dead_letters(self, family: Family | None = None) -> list[DeadLetter]:
        """Return dead letters, oldest first, of one family or of all."""
        letters = []
        for name in [keys.dead(family)] if family else await self._scan("*:dead"):
            for row in await self.call("XRANGE", name, "-", "+"):
                letter = _letter(row[1])
                if letter is not None:
                    letters.append(letter)
        return sorted(letters, key=lambda letter: letter.at_ms)

    async def dead_letter_count(self, family: Family) -> int:
        """Return how many dead letters a family keeps."""
        return int(await self.call("XLEN", keys.dead(family)))

    async def condemned(self) -> list[Family]:
        """Return the families that keep dead letters, by a walk over all keys."""
        found = []
        for name in await self._scan("{*}:dead"):
            with contextlib.suppress(ValueError):  # somebody else's key
                family = Family.parse(name[1:].partition("}")[0])
                if await self.dead_letter_count(family):
                    found.append(family)
        return found

    async def drop_dead_letter(self, job: str) -> bool:
        """Delete a dead letter; False if there is none of this job."""
        name, letters = keys.dead(family_of(job)), keys.letters(family_of(job))
        entries = await self.call("HGET", letters, job)
        if entries is None:  # of an earlier version, and not indexed yet
            await self.index_letters(family_of(job))
            entries = await self.call("HGET", letters, job)
        if entries is None:
            return False
        dropped = bool(await self.call("XDEL", name, *entries.split()))
        await self.call("HDEL", letters, job)
        return dropped

    async def index_letters(self, family: Family) -> int:
        """Index a family's dead letters by job, as those of earlier versions are not; may be repeated.

        Returns how many of them are of a request's stages.
        """
        start, stages = "-", 0
        names = [keys.letters(family)]
        while rows := await self.call("XRANGE", keys.dead(family), start, "+", "COUNT", LETTERS):
            for entry, flat in rows:
                job = dict(zip(flat[::2], flat[1::2], strict=True)).get(b"job", b"")
                await self.script("index", names, [job, entry])
                stages += b"." in job.rpartition(b"~")[2]
            start = "(" + rows[-1][0].decode()
        return stages

    async def _scan(self, pattern: str) -> list[str]:
        found: set[str] = set()
        for call in self.callers():
            cursor = b"0"
            while True:
                cursor, names = await call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
                found |= {name.decode() for name in names}
                if cursor in {b"0", 0}:
                    break
        return sorted(found)


def _letter(flat: Sequence[bytes]) -> DeadLetter | None:
    """Return one entry of a family's dead letters; None, counted and logged, if it is none."""
    f = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        return DeadLetter(
            job=f[b"job"].decode(),
            tenant=f[b"tenant"].decode(),
            payload=f[b"payload"],
            items=int(f[b"items"]),
            tokens=int(f[b"tokens"]),
            code=f[b"code"].decode(),
            message=f[b"message"].decode(errors="replace"),
            trace=f[b"trace"].decode(errors="replace"),
            attempts=int(f[b"attempts"]),
            at_ms=int(f[b"at"]),
        )
    except (KeyError, ValueError) as error:
        unreadable.note("dead", repr(error))
        return None
