"""Model cards as workers publish them, read at most once a second, with their tokenizers on disk."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from common.bus import Bus
from common.errors import InvalidRequest, NotFound, Unavailable
from common.ids import Family
from common.registry.models import FRESH_S, Models
from common.types.model_card import ModelCard
from engine.models.encoders.files import model_name
from services.router.text.tokens import Spec


class Cards:
    """Model cards by name; a tokenizer is fetched once per fingerprint into `<data_dir>/cache`.

    `embed` is the name of the default encoder, `rerank` the directory or hub id of the default cross-encoder; `aliases`
    are other names of models, which apply only while no model of the same name is served.
    """

    def __init__(
        self,
        bus: Bus,
        data_dir: str,
        *,
        embed: str = "",
        rerank: str = "",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._bus = bus
        self._directory = Path(data_dir) / "cache" / "tokenizers"
        self._embed, self._rerank = embed, rerank and model_name(rerank)
        self._read_at: float | None = None
        self._first = asyncio.Lock()
        self._cards: dict[str, ModelCard] = {}
        self._specs: dict[str, Spec] = {}
        self._aliases = dict(aliases or {})
        self._named: dict[str, Spec] = {}  # the specs, by names and aliases

    async def cards(self) -> dict[str, ModelCard]:
        """Return all cards by name, at most a second old."""
        await self._refresh()
        return self._cards

    async def specs(self) -> dict[str, Spec]:
        """Return every model's spec by its name and by its aliases, for the text processes."""
        await self._refresh()
        return self._named

    async def aliased(self) -> dict[str, ModelCard]:
        """Return the cards of served models by their aliases."""
        cards = await self.cards()
        return {
            alias: cards[model]
            for alias, model in self._aliases.items()
            if model in cards and alias not in cards
        }

    async def embed_default(self) -> str:
        """Return the default encoder's name; Unavailable `no_worker` if no encoder was ever served."""
        names = [name for name, card in (await self.cards()).items() if card.kind == "embed"]
        if self._embed or names:
            return self._embed or names[0]
        raise Unavailable(
            "no worker serves an encoder yet; try again", code="no_worker", retry_after_s=2
        )

    async def rerank_default(self) -> str:
        """Return the cross-encoder's name if there is one, else the default encoder's."""
        names = [name for name, card in (await self.cards()).items() if card.kind == "rerank"]
        return self._rerank or (names[0] if names else await self.embed_default())

    async def cross_encoder(self, name: str = "") -> Spec:
        """Return a cross-encoder, by default the one that is served; InvalidRequest `no_reranker` if there is none."""
        specs = await self.specs()
        served = sorted(spec.name for spec in specs.values() if spec.kind == "rerank")
        spec = specs.get(name or self._rerank or next(iter(served), ""))
        if spec is not None and spec.kind == "rerank":
            return spec
        there = f"expected one of: {', '.join(served)}" if served else "none is served here"
        wrong = f"{name!r} is no cross-encoder" if name else "there is no cross-encoder"
        raise InvalidRequest(
            f"retrieval.rerank: {wrong}; {there} (SPILLWAY_RERANK_MODEL of router and workers names one). An encoder "
            "has ranked the passages already",
            code="no_reranker",
            param="retrieval.rerank",
        )

    async def generate_default(self) -> str:
        """Return the name of the first generator that has a living worker, else of the first generator.

        Unavailable `no_worker` if no generator was ever served.
        """
        cards = await self.cards()
        names = sorted(name for name, card in cards.items() if card.kind == "generate")
        if len(names) > 1:
            for name in names:
                if await self._bus.workers.living(Family(cards[name].family)):
                    return name
        if names:
            return names[0]
        raise Unavailable(
            "no worker serves a generator yet; try again", code="no_worker", retry_after_s=2
        )

    async def card(self, name: str) -> ModelCard:
        """Return one card, by its name or an alias; NotFound `model_not_found` names the served models."""
        cards = await self.cards()
        if name not in cards:
            name = self._aliases.get(name, name)
        if name not in cards:
            served = ", ".join(sorted(cards)) or "none"
            raise NotFound(
                f"model {name!r} is not served here; expected one of: {served}",
                code="model_not_found",
                param="model",
            )
        return cards[name]

    async def family(self, name: str, seed: str, index: int = 0) -> Family:
        """Return the family, with a partition drawn from `seed` and `index`, in which a model's jobs run."""
        card = await self.card(name)
        drawn = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "big")
        return Family(card.family, (drawn + index) % max(card.partitions, 1))

    async def families(self) -> list[Family]:
        """Return every partition of every model's family."""
        cards = await self.cards()
        return [Family(c.family, p) for c in cards.values() for p in range(max(c.partitions, 1))]

    async def _refresh(self) -> None:
        if self._cards:
            await self._read()
            return
        async with (
            self._first
        ):  # others wait for the first read, since "no card" may be untrue before it ends
            await self._read()

    async def _read(self) -> None:
        now = self._bus.clock.monotonic()
        if self._read_at is not None and now - self._read_at < FRESH_S:
            return
        self._read_at = now
        try:
            cards = await Models(self._bus).cards()
            for name, card in cards.items():
                if self._cards.get(name) != card:
                    self._specs[name] = await self._spec(card)
        except Unavailable:
            if not self._cards:
                self._read_at = None
                raise
            return
        for name in set(self._specs) - set(cards):
            del self._specs[name]
        self._cards = cards
        served = {a: self._specs[m] for a, m in self._aliases.items() if m in self._specs}
        self._named = {**served, **self._specs}

    async def _spec(self, card: ModelCard) -> Spec:
        digest = hashlib.blake2b(f"{card.name}:{card.fingerprint}".encode(), digest_size=16)
        path = self._directory / f"{digest.hexdigest()}.json"
        text = await Models(self._bus).tokenizer(card.name)
        path = await asyncio.to_thread(_write_unless_there, path, text)
        return Spec(**msgspec.structs.asdict(card), path=str(path))


def _write_unless_there(path: Path, text: bytes) -> Path:
    """Write a file that is missing, damaged or half written, and return its absolute path; waits for the disk."""
    if path.exists() and path.read_bytes() == text:
        return path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_bytes(text)
    fresh.replace(path)
    return path.resolve()
