"""Answers whose passages are found anew while they are written, under kills: all is as in the undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from chaos.chat_kinds import PooledChat, asked
from chaos.clients import Clients, Done
from models.demo.world import handbook

COLLECTION = "f1-handbook"
K, INTERVAL, TOKENS = 2, 16, 80
RETRIEVALS = 1 + (TOKENS - 1) // INTERVAL  # of an answer, the one before it counted
REPLACED = 2  # of them at least put other passages into the prompt
_ASKED = 60  # questions, of which some find the same passages again and again


@dataclass
class Pipelined(PooledChat):
    """Questions about the handbook, half of them greedy and half drawn, with a retrieval every INTERVAL tokens."""

    name: ClassVar[str] = "pipelined"

    async def prepare(self, clients: Clients) -> None:
        """Store the handbook and ask every question of the pool alone."""
        client = clients.first
        await client.collections.create(COLLECTION)
        pages = [{"id": page.name, "text": page.text} for page in handbook.pages()]
        written = await client.documents(COLLECTION).add(pages)
        await client.search(COLLECTION, pages[0]["text"], k=1, after=written.applied)
        for question in handbook.questions(_ASKED):
            if len(self.pool) == self.count:
                return
            greedy = len(self.pool) % 2 == 0
            body = asked(
                [{"role": "user", "content": question.text}], len(self.pool), greedy=greedy
            )
            body |= {"max_completion_tokens": TOKENS, "min_tokens": TOKENS}
            body["retrieval"] = {
                "collection": COLLECTION,
                "k": K,
                "interval": INTERVAL,
                "effort": "exact",
            }
            known = await self.alone(clients, body, greedy=greedy)
            if len(known.retrievals) != RETRIEVALS:
                raise RuntimeError(
                    f"undisturbed: {len(known.retrievals)} retrievals of {RETRIEVALS}"
                )
            if sum(bool(replaced) for *_, replaced in known.retrievals) >= REPLACED:
                self.pool.append((body, known))
        raise RuntimeError(
            f"{len(self.pool)} of {_ASKED} questions find other passages; {self.count} are needed"
        )


def amid_retrievals(done: Done) -> bool:
    """Return whether passages of an answer have been replaced and a retrieval of it is left."""
    replaced = any(each["replaced"] for each in done.retrievals)
    return replaced and len(done.retrievals) < RETRIEVALS
