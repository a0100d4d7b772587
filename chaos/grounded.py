"""Grounded questions while processes die: passages, answer and citations are those of the undisturbed run."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chaos.chat_kinds import ChatKind, asked
from chaos.clients import Clients, Done
from chaos.compare import Known
from chaos.kinds import SCORE
from loadgen import bodies

COLLECTION = "f1-grounds"
K = 3


@dataclass
class Grounded(ChatKind):
    """Questions on a collection that does not change; only those whose passages are clearly ranked are asked."""

    name: ClassVar[str] = "grounded"
    count: int = 6
    pool: list[tuple[dict[str, Any], Known]] = field(default_factory=list)

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

    async def once(self, clients: Clients, number: int, done: Done) -> str:
        """Ask one question of the pool."""
        body, known = self.pool[number % len(self.pool)]
        answer = await self.ask(clients, body, done, done.key)
        return self.comparison.judge(done.key, known, answer)

    async def audit(self, clients: Clients) -> list[str]:
        """Ask every question once more."""
        wrong = []
        for number in range(len(self.pool)):
            done = Done(self.name, f"audit-grounded-{number}", time.monotonic())
            verdict = await self.once(clients, number, done)
            wrong += [f"grounded: question {number}: {verdict}"] if verdict != "ok" else []
        return wrong
