"""Workflow plans and response options: what an earlier router wrote is read, and written the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.wire.workflows import (
    GroundPlan,
    ParcelsPlan,
    decode_options,
    decode_plan,
    encode_options,
    encode_plan,
)

_OPTIONS: dict[str, Any] = {
    "kind": "chat",
    "model": "m",
    "tokens": 3,
    "stream": True,
    "resume_s": 30.0,
}
_COLLECTION: dict[str, Any] = {
    "v": 1,
    "id": "c1",
    "tenant": "t",
    "name": "docs",
    "dimension": 4,
    "metric": "cosine",
    "model": "e",
    "fingerprint": "f",
    "created_ms": 5,
}
_PARCELS: dict[str, Any] = {
    "type": "parcels",
    "model": "m",
    "view": _OPTIONS,
    "parcels": [[b"work", 2, 7]],
    "whole": True,
}
_GROUND: dict[str, Any] = {
    "type": "ground",
    "collection": _COLLECTION,
    "search": {
        "many": True,
        "count": 1,
        "tokens": [[1, 2]],
        "vectors": b"",
        "k": 5,
        "filter": None,
        "min_score": None,
        "include_text": True,
        "include_metadata": False,
        "ef": None,
        "exact": False,
        "after": None,
    },
    "parcel": [32, 8192],
    "queries": 256,
    "chat": {
        "model": "m",
        "scope": "t",
        "messages": [{"role": "user", "content": "why?"}],
        "options": {"sampling": {"temperature": 0.5}, "max_new": 8},
        "retrieval": {"collection": "docs", "k": 7, "include_passages": True},
    },
    "view": _OPTIONS,
}


def test_a_plan_of_parcels_keeps_its_former_names() -> None:
    plan = decode_plan(msgspec.msgpack.encode(_PARCELS))

    assert isinstance(plan, ParcelsPlan)
    assert (plan.options.model, plan.options.resume_s) == ("m", 30.0)
    written = msgspec.msgpack.decode(encode_plan(plan))
    assert _PARCELS.keys() == written.keys()
    assert written["view"]["kind"] == "chat"


def test_a_plan_of_a_grounded_chat_keeps_its_former_names() -> None:
    plan = decode_plan(msgspec.msgpack.encode(_GROUND))

    assert isinstance(plan, GroundPlan)
    assert plan.chat.retrieval is not None
    assert (plan.chat.retrieval.collection, plan.chat.retrieval.k) == ("docs", 7)
    assert plan.chat.retrieval.include_passages
    written = msgspec.msgpack.decode(encode_plan(plan))
    assert _GROUND.keys() == written.keys()
    assert written["chat"]["retrieval"].items() >= _GROUND["chat"]["retrieval"].items()


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="nonsense"):
        decode_plan(msgspec.msgpack.encode({"type": "nonsense"}))


def test_response_options_survive_a_job_record() -> None:
    options = decode_options(msgspec.msgpack.encode(_OPTIONS))

    assert decode_options(encode_options(options)) == options
    assert options.stream
