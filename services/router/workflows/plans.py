"""What a request of several jobs carries in its RequestWork: enough for any router to go on with it."""

from __future__ import annotations

import msgspec

from common.wire.registry import CollectionRecord
from services.router.responses.json_bodies import ResponseOptions
from services.router.text.chats import ChatRequest
from services.router.text.collections import SearchRequest


class ParcelsPlan(msgspec.Struct, frozen=True, tag="parcels"):
    """Embeddings or scores of many parcels: encoded Work, items and tokens of each.

    With `whole` all of them are admitted at once, or the request is refused.
    """

    model: str
    view: ResponseOptions
    parcels: list[tuple[bytes, int, int]]
    whole: bool = False


class SearchPlan(msgspec.Struct, frozen=True, tag="search"):
    """Embed the question, then search every shard."""

    collection: CollectionRecord
    ask: SearchRequest
    parcel: tuple[int, int]
    queries: int


class WritePlan(msgspec.Struct, frozen=True, tag="write"):
    """Store documents: `items` is an encoded list of StoreItem; `parcel` fixes how texts are cut into jobs."""

    collection: CollectionRecord
    items: bytes
    parcel: tuple[int, int]


class DeletePlan(msgspec.Struct, frozen=True, tag="delete"):
    """Delete documents by id."""

    collection: CollectionRecord
    ids: list[str]
    single: bool = False


class ReembedPlan(msgspec.Struct, frozen=True, tag="reembed"):
    """Embed all of a collection's texts anew and let its name mean the result."""

    collection: CollectionRecord
    target: CollectionRecord
    parcel: tuple[int, int]


class GroundPlan(msgspec.Struct, frozen=True, tag="ground"):
    """Embed a chat's question, search, and answer from what is found; `search` and `chat` hold all that was asked."""

    collection: CollectionRecord
    search: SearchRequest
    parcel: tuple[int, int]
    queries: int
    chat: ChatRequest
    view: ResponseOptions


Plan = ParcelsPlan | SearchPlan | WritePlan | DeletePlan | ReembedPlan | GroundPlan
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Plan)


def decode_plan(raw: bytes) -> Plan:
    """Decode a plan by its tag; msgspec.MsgspecError if it is none of ours."""
    plan: Plan = _decoder.decode(raw)
    return plan


def encode_plan(plan: Plan) -> bytes:
    """Encode a plan for RequestWork.body."""
    return _encoder.encode(plan)
