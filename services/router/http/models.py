"""The models that workers serve, from their cards: GET /v1/models in OpenAI's shape, GET /info in TEI's."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from common.config import RouterConfig
from common.metrics import version
from common.types.model_card import ModelCard
from services.router.cards import Cards
from services.router.http.replies import reply_json


def _shown(name: str, card: ModelCard) -> dict[str, Any]:
    """Return a card as a model of this name, with the fields that OpenAI's and vLLM's clients read, and our own."""
    return {
        "id": name,
        "object": "model",
        "created": card.created_ms // 1000,
        "owned_by": "spillway",
        "root": card.name,
        "kind": card.kind,
        "dimension": card.dimension,
        "max_tokens": card.max_tokens,
        "max_model_len": card.max_tokens,
        "fingerprint": card.fingerprint,
    }


class ModelsApi:
    """Lists and describes models."""

    def __init__(self, cards: Cards, config: RouterConfig) -> None:
        self._cards, self._config = cards, config

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/info", self.info),
            web.get("/v1/models", self.list_all),
            web.get("/v1/models/{model:.+}", self.get),
        ]

    async def list_all(self, _request: web.Request) -> web.Response:
        """List every model for which a worker has published a card, and every alias of such a model."""
        named = {**await self._cards.cards(), **await self._cards.aliased()}
        data = [_shown(name, card) for name, card in sorted(named.items())]
        return reply_json({"object": "list", "data": data})

    async def get(self, request: web.Request) -> web.Response:
        """Return one model, or 404."""
        name = request.match_info["model"]
        return reply_json(_shown(name, await self._cards.card(name)))

    async def info(self, _request: web.Request) -> web.Response:
        """Return TEI's description of a model for the default encoder; vectors are sent as float32."""
        card, config = await self._cards.card(await self._cards.embed_default()), self._config
        body = {
            "model_id": card.name,
            "model_sha": card.fingerprint,
            "model_dtype": "float32",
            "model_type": {"embedding": {}},
            "max_concurrent_requests": config.max_connections,
            "max_input_length": card.max_tokens,
            "max_batch_tokens": config.max_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": config.max_texts,
            "auto_truncate": config.truncate,
            "tokenization_workers": config.text_processes,
            "version": version(),
            "sha": None,
            "docker_label": None,
        }
        return reply_json(body)
