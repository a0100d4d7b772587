"""GET /v1/models: the models that workers serve, from their cards."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from common.types.model_card import ModelCard
from services.router.cards import Cards
from services.router.http.replies import reply_json


def _shown(card: ModelCard) -> dict[str, Any]:
    """Return a card as OpenAI's clients expect a model, with our own fields beside."""
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


class ModelsApi:
    """Lists and describes models."""

    def __init__(self, cards: Cards) -> None:
        self._cards = cards

    def routes(self) -> list[web.RouteDef]:
        """Return both routes."""
        return [
            web.get("/v1/models", self.list_all),
            web.get("/v1/models/{model:.+}", self.get),
        ]

    async def list_all(self, _request: web.Request) -> web.Response:
        """List every model for which a worker has published a card."""
        cards = await self._cards.cards()
        data = [_shown(card) for _, card in sorted(cards.items())]
        return reply_json({"object": "list", "data": data})

    async def get(self, request: web.Request) -> web.Response:
        """Return one model, or 404."""
        return reply_json(_shown(await self._cards.card(request.match_info["model"])))
