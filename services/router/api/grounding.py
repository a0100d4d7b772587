"""Grounded chats at the door: what is asked becomes one request of three jobs; what is refused is refused here."""

from __future__ import annotations

from functools import partial

import msgspec

from common.errors import InvalidRequest, NotFound
from common.messages import CollectionRecord
from services.router.context import Router
from services.router.queue.dispatch import SEARCH_CLASSES, Ask, Caller
from services.router.queue.embedding import checked_encoder
from services.router.queue.grounding import Told
from services.router.queue.plans import GroundPlan
from services.router.queue.refusals import refusal
from services.router.queue.searching import QUERIES_AT_ONCE
from services.router.queue.writing import shard_families
from services.router.text.chats import ChatAsk
from services.router.text.collections import SearchAsk
from services.router.text.deltas import Extension
from services.router.text.grounded import query_tokens
from services.router.text.grounding import Passage, RetrievalBody, cited
from services.router.text.pool import INLINE_TEXT_BYTES
from services.router.text.replies import View

# Turns of a session that a question may lean on.
_TURNS = 4


async def ask_of(router: Router, caller: Caller, chat: ChatAsk, view: View) -> Ask:
    """Return the request that answers a chat from a collection.

    Refused at once: no such collection, one without an encoder, another encoder than the one served, and kinds of
    work nobody is there for.
    """
    retrieval = chat.retrieval
    assert retrieval is not None, "a chat without retrieval is one job"
    record = await _collection(router, caller.tenant, retrieval.collection)
    spec = checked_encoder(record, await router.cards.specs())
    for name in (spec.name, chat.model):
        if not await router.bus.workers(await router.cards.family(name, caller.tenant)):
            raise refusal("no_worker", 2.0)
    earlier = await _earlier(router, chat.session) if chat.session else []
    size = sum(len(message["content"]) for message in [*earlier, *chat.messages])
    call = partial(query_tokens, chat, spec, record.query_prompt, earlier)
    tokens = await router.pool.run(call, inline=size < INLINE_TEXT_BYTES)
    families = shard_families(record)
    await router.dispatch.foresee(families[0], SEARCH_CLASSES, len(tokens), 0, caller.deadline_ms)
    bounds = await router.encoder_limits()
    most = router.depths.get(families[0].name, (QUERIES_AT_ONCE, 0))[0]
    parcel = (bounds.parcel_items, bounds.parcel_tokens)
    plan = GroundPlan(record, _search(retrieval, tokens), parcel, most, chat, view)
    return router.several(caller.tenant, "chat", plan, view, sum(map(len, tokens)))


async def _collection(router: Router, tenant: str, name: str) -> CollectionRecord:
    record = await router.bus.collection(tenant, name)
    if record is None:
        raise NotFound(
            f"no collection {name!r}", code="collection_not_found", param="retrieval.collection"
        )
    if record.model is None:
        raise InvalidRequest(
            f"collection {name!r} has no encoder (model is null), so a question cannot be searched for in it; "
            "name a collection that embeds texts",
            code="vectors_only",
            param="retrieval.collection",
        )
    return record


async def _earlier(router: Router, session: str) -> list[dict[str, str]]:
    """Return the last turns of a session as its client sent them; who owns it is looked at when the turn is made."""
    found: list[dict[str, str]] = []
    for turn in await router.bus.turns(session, -_TURNS):
        found += msgspec.json.decode(turn.shown or turn.messages, type=list[dict[str, str]])
        found.append({"role": "assistant", "content": turn.answer})
    return found


def _search(retrieval: RetrievalBody, tokens: list[list[int]]) -> SearchAsk:
    return SearchAsk(
        many=True,
        count=len(tokens),
        tokens=tokens,
        vectors=b"",
        k=retrieval.k,
        filter=retrieval.filter,
        min_score=retrieval.min_score,
        include_text=True,
        include_metadata=False,
        ef=None,
        exact=False,
        after=None,
    )


def extension(told: Told) -> Extension:
    """Return what a grounded answer adds to a chat's: its passages, and the citations of a whole answer."""
    passages = msgspec.convert(told.retrieval["passages"], list[Passage])
    return Extension(
        retrieval=told.retrieval,
        citations=lambda answer: [msgspec.to_builtins(one) for one in cited(answer, passages)],
    )
