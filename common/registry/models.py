"""The registry of model cards: the facts about a model on which router and workers must agree."""

from __future__ import annotations

import zlib

from common.bus import Bus, keys
from common.types.model_card import ModelCard
from common.wire.message import decode, encode

FRESH_S = 1.0  # a router may not know a card that was published more recently


class Models:
    """Cards of models, each with its tokenizer."""

    def __init__(self, bus: Bus) -> None:
        self._redis = bus.connection

    async def publish(self, card: ModelCard, tokenizer: bytes) -> None:
        """Publish a model's card with its tokenizer.json."""
        packed = zlib.compress(tokenizer, 1)
        await self._redis.call(
            "HSET", keys.model(card.name), "card", encode(card), "tokenizer", packed
        )
        await self._redis.call("SADD", keys.MODELS, card.name)

    async def cards(self) -> dict[str, ModelCard]:
        """Return every model's card by name."""
        found = {}
        for name in sorted(await self._redis.call("SMEMBERS", keys.MODELS)):
            raw = await self._redis.call("HGET", keys.model(name.decode()), "card")
            if raw is not None:
                found[name.decode()] = decode(raw, ModelCard)
        return found

    async def tokenizer(self, name: str) -> bytes:
        """Return a model's tokenizer.json; KeyError if there is no such card."""
        raw = await self._redis.call("HGET", keys.model(name), "tokenizer")
        if raw is None:
            raise KeyError(name)
        return zlib.decompress(raw)
