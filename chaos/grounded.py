"""Grounded questions while processes die: passages, answer and citations are those of the undisturbed run."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import ClassVar

from chaos.chat_kinds import PooledChat, asked
from chaos.clients import Clients
from chaos.kinds import SCORE
from loadgen import bodies

COLLECTION = "f1-grounds"
K = 3


@dataclass
class Grounded(PooledChat):
    """Questions on a collection that does not change; only those whose passages are clearly ranked are asked."""

    name: ClassVar[str] = "grounded"

    async def prepare(self, clients: Clients) -> None:
        """Store 60 documents and ask every question of the pool alone."""
        rng, client = random.Random(23), clients.first
        texts = [bodies.text(40, rng) for _ in range(60)]
        await client.collections.create(COLLECTION)
        documents = [{"id": f"g{i}", "text": text} for i, text in enumerate(texts)]
        written = await client.documents(COLLECTION).add(documents)
        for number, text in enumerate(texts):
            if len(self.pool) == self.count:
                return
            question = " ".join(text.split()[:12])
            found = await client.search(COLLECTION, question, k=K + 1, after=written.applied)
            scores = [hit.score for hit in found.data]
            if min(a - b for a, b in itertools.pairwise(scores)) < 2 * SCORE:
                continue
            body = asked([{"role": "user", "content": question}], number, greedy=number % 2 == 0)
            body["retrieval"] = {"collection": COLLECTION, "k": K}
            known = await self.alone(clients, body, greedy=number % 2 == 0)
            if len(known.passages) != K:
                raise RuntimeError(f"undisturbed: {len(known.passages)} passages of {K}")
            self.pool.append((body, known))
        raise RuntimeError("no question has clearly ranked passages")
