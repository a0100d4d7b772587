"""The JSON bodies of session routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.router.text.bodies import ModelName

TtlSeconds = Annotated[int, Meta(ge=1, le=10 * 366 * 24 * 3600)]


class SessionBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/sessions; `model` absent means the default chat model."""

    model: ModelName | None = None
    ttl_s: TtlSeconds | None = None
    metadata: dict[str, Any] | None = None


class SessionChangeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/sessions/{id}: what is given is set; `metadata` replaces all of it."""

    ttl_s: TtlSeconds | None = None
    metadata: dict[str, Any] | None = None
    pin: bool | None = None


class SessionImportBody(Struct, frozen=True):
    """POST /v1/sessions/import: what the router reads of an exported document; kv_store checks the rest."""

    format: Literal["spillway.session/1"]
    model: ModelName
    ttl_s: TtlSeconds | None = None
    metadata: dict[str, Any] = {}
