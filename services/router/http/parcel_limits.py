"""Limits of one request and of one parcel, from the configuration and the depths of lanes."""

from __future__ import annotations

from common.config import RouterConfig
from common.cost.linear import PARCEL_ITEMS, PARCEL_TOKENS
from services.router.cards import Cards
from services.router.mesh.lane_depths import LaneDepths
from services.router.text.bodies import RequestLimits


class ParcelLimits:
    """Limits under which texts are parsed and cut into parcels: no parcel is larger than its lane can hold."""

    def __init__(self, config: RouterConfig, depths: LaneDepths, cards: Cards) -> None:
        self._config, self._depths, self._cards = config, depths, cards

    def of(self, family: str = "") -> RequestLimits:
        """Return the limits for the lanes of `family`; without a family, or with unknown depths, the largest limits."""
        items, tokens = self._depths.of(family) or (PARCEL_ITEMS, PARCEL_TOKENS)
        return RequestLimits(
            self._config.max_texts,
            self._config.max_tokens,
            max(1, min(PARCEL_ITEMS, items)),
            max(1, min(PARCEL_TOKENS, tokens)),
            self._config.truncate,
        )

    async def encoders(self) -> RequestLimits:
        """Return the limits for the lanes of the first encoder that has a worker."""
        cards = (await self._cards.cards()).values()
        encoders = [card.family for card in cards if card.kind != "generate"]
        return self.of(next((family for family in encoders if self._depths.of(family)), ""))
