"""GET /v1/models: what workers serve, from their cards."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from common.types.model_card import ModelCard
from services.router.http.context import ROUTER, reply


def shown(card: ModelCard) -> dict[str, Any]:
    """Return a card as OpenAI's clients expect a model, with what is ours beside it."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_ms // 1000,
        "owned_by": "spillway",
        "kind": card.kind,
        "dimension": card.dimension,
        "max_tokens": card.max_tokens,
        "fingerprint": card.fingerprint,
    }


async def list_all(request: web.Request) -> web.Response:
    """List every model a worker has published."""
    cards = await request.app[ROUTER].cards.cards()
    data = [shown(card) for _, card in sorted(cards.items())]
    return reply(msgspec.json.encode({"object": "list", "data": data}))


async def get(request: web.Request) -> web.Response:
    """Return one model, or 404."""
    card = await request.app[ROUTER].cards.card(request.match_info["model"])
    return reply(msgspec.json.encode(shown(card)))
