"""The session store: jobs that list, export, import, delete and pin sessions, each repeatable after a kill."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from common.bus import Bus
from common.errors import Conflict, InvalidRequest, NotFound, TooLarge, Unavailable
from common.ids import family_of
from common.registry.models import Models
from common.registry.sessions import SessionEnds, Sessions
from common.types.model_card import ModelCard
from common.wire.message import MAX_MESSAGE_BYTES, BadMessage, decode
from common.wire.sessions import SessionRecord, SessionWork, Turn, shown
from common.worker.leases import Lease
from services.kv_store import metrics
from services.kv_store.deletion.session_eraser import SessionEraser
from services.kv_store.pages.session_pins import SessionPins
from services.kv_store.sessions import session_documents

_ROOM = 64 * 1024
_PAGE = 32
Note = Callable[[bytes], Awaitable[None]]


class SessionStore:
    """Executes jobs on sessions; each process has one."""

    def __init__(self, bus: Bus, eraser: SessionEraser, pins: SessionPins | None = None) -> None:
        self.bus, self._eraser, self._pins = bus, eraser, pins
        self._vocabularies: dict[str, int] = {}

    async def perform(self, work: SessionWork, lease: Lease, note: Note) -> bytes:
        """Execute one job and return its JSON; `note` stores bytes in the job's log for a repetition after a kill."""
        if work.op == "list":
            return await self._list(work)
        if work.op == "export":
            return await self._export(work, lease.job)
        if work.op == "import":
            return await self._import(work, lease.job)
        if work.op in ("pin", "unpin"):
            return await self._pin(work)
        if work.turn:
            return await self._delete_turn(work)
        return await self._delete(work, lease, note)

    async def _list(self, work: SessionWork) -> bytes:
        limit = work.limit
        while True:
            try:
                found, cursor = await Sessions(self.bus).page(work.tenant, work.cursor, limit)
            except ValueError as error:
                raise InvalidRequest(
                    f"after: {error}", code="invalid_cursor", param="after"
                ) from None
            page = {
                "object": "list",
                "data": [shown(record) for record in found],
                "has_more": cursor is not None,
                "next": cursor,
            }
            body = msgspec.json.encode(page)
            if len(body) <= MAX_MESSAGE_BYTES - _ROOM or len(found) < 2:
                return body
            limit = len(found) // 2  # metadata is large: return a shorter page

    async def _export(self, work: SessionWork, job: str) -> bytes:
        record = await session_of(self.bus, work)
        await Sessions(self.bus).note_job(record.id, job)  # its result has the conversation
        turns: list[session_documents.TurnDocument] = []
        size, at = 0, 0
        while True:
            rows = await Sessions(self.bus).encoded_turns(record.id, at, _PAGE)
            turns += [session_documents.turn_document(decode(row, Turn)) for row in rows]
            size, at = size + sum(map(len, rows)), at + len(rows)
            if len(rows) < _PAGE:
                break
            if size > 2 * MAX_MESSAGE_BYTES:
                raise _too_large(record.id, size)
        body = msgspec.json.encode(session_documents.exported(record, turns))
        if len(body) > MAX_MESSAGE_BYTES - _ROOM:
            raise _too_large(record.id, len(body))
        return body

    async def _import(self, work: SessionWork, job: str) -> bytes:
        document = session_documents.read(work.body)
        family = family_of(work.session)
        cards = (await Models(self.bus).cards()).values()
        card = next((card for card in cards if card.family == family.name), None)
        if card is None:
            raise Unavailable("no worker serves a chat model yet; try again", code="no_worker")
        tokens = session_documents.keeps_tokens(document, card.fingerprint)
        if tokens:
            session_documents.check_tokens(document, await self._vocabulary(card))
        turns = session_documents.imported(document, job, tokens=tokens)
        last = turns[-1] if turns else None
        now, stored = self.bus.clock.now_ms(), await Sessions(self.bus).get(work.session)
        record = SessionRecord(
            id=work.session,
            tenant=work.tenant,
            model=card.name,
            fingerprint=card.fingerprint if tokens else "",
            version=len(turns),
            tokens=last.history + len(last.prompt) + len(last.output) if last else 0,
            turns=len(turns),
            ttl_s=work.ttl_s,
            created_ms=stored.created_ms if stored else now,
            updated_ms=stored.updated_ms if stored else now,
            metadata=msgspec.json.encode(document.metadata),
        )
        await Sessions(self.bus).create(record, turns)
        await Sessions(self.bus).note_job(record.id, job)
        return msgspec.json.encode({**shown(record), "tokens_kept": tokens})

    async def _pin(self, work: SessionWork) -> bytes:
        record = await session_of(self.bus, work)
        if self._pins is None:
            raise Conflict(
                "no pages are kept below the workers (SPILLWAY_PAGES_URL is none): nothing can be pinned",
                code="no_page_tier",
            )
        await (self._pins.pin(record) if work.op == "pin" else self._pins.unpin(record))
        return msgspec.json.encode(shown(await session_of(self.bus, work)))

    async def _vocabulary(self, card: ModelCard) -> int:
        """Return the largest token id of a model's tokenizer, plus one."""
        if card.fingerprint not in self._vocabularies:
            tokenizer = msgspec.json.decode(await Models(self.bus).tokenizer(card.name))
            self._vocabularies[card.fingerprint] = 1 + max(_ids(tokenizer), default=-1)
        return self._vocabularies[card.fingerprint]

    async def _delete(self, work: SessionWork, lease: Lease, note: Note) -> bytes:
        try:
            record = await Sessions(self.bus).stored(work.session)
        except ValueError:
            raise _unknown(work.session) from None
        if record is not None and record.tenant != work.tenant:
            raise _unknown(work.session)
        proof = await self._proven(lease)  # set if an earlier try has a proof of the deletion
        if proof is None:
            (found,) = await self._eraser.erase(
                [(work.session, work.tenant)], lease.deadline_ms, prove=True
            )
            proof = msgspec.json.encode(found)
            await note(proof)
        await SessionEnds(self.bus).forget(work.session, work.tenant)
        metrics.ERASED.labels("deleted").inc()
        return proof

    async def _delete_turn(self, work: SessionWork) -> bytes:
        """Delete one turn and all that was run for it; Conflict `session_busy` while another turn runs.

        Stored pages are removed first, since they are found by the tokens of the turn.
        """
        record = await session_of(self.bus, work)
        if await Sessions(self.bus).running_turn(record) is not None:
            raise Conflict(
                f"session {work.session} is in a turn: one is deleted between two turns",
                code="session_busy",
            )
        await self._eraser.erase_turn(work.session, work.turn)
        return msgspec.json.encode({"id": work.turn, "object": "session.turn", "deleted": True})

    async def _proven(self, lease: Lease) -> bytes | None:
        if lease.attempts < 2:
            return None
        try:
            events = await self.bus.jobs.log(lease.job)
        except BadMessage:
            return None
        return events[-1].data if events else None


async def session_of(bus: Bus, work: SessionWork) -> SessionRecord:
    """Return the session of a job; NotFound if the session is not the tenant's."""
    try:
        record = await Sessions(bus).get(work.session)
    except ValueError:
        record = None
    if record is None or record.tenant != work.tenant:
        raise _unknown(work.session)
    return record


def _ids(tokenizer: Any) -> list[int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    return ids + [token["id"] for token in tokenizer.get("added_tokens", ())]


def _unknown(session: str) -> NotFound:
    return NotFound(
        f"no session {session[:200]!r}: it is unknown, deleted or expired", code="session_not_found"
    )


def _too_large(session: str, size: int) -> TooLarge:
    return TooLarge(
        f"session {session} is {size} bytes: an export holds at most {MAX_MESSAGE_BYTES - _ROOM}; read its "
        "messages by GET /v1/sessions/{id}?include=messages",
        code="session_too_large",
    )
