"""Chat while processes die: streams and conversations, each compared with the undisturbed run."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chaos.clients import Clients, Done
from chaos.compare import Comparison, Known, known_of
from loadgen import bodies
from loadgen.chat.answer import StreamedAnswer

LOGPROBS = {"logprobs": True, "top_logprobs": 2}
# Every kind's answers are long enough that most kills meet some in mid-stream, and end by their length.
TOKENS = (16, 48, 128)


def asked(messages: list[dict[str, str]], number: int, *, greedy: bool) -> dict[str, Any]:
    """Return a request for exactly as many tokens as its number says, greedy or drawn with its seed."""
    tokens = TOKENS[number % len(TOKENS)]
    drawn = {} if greedy else {"temperature": 0.9, "top_p": 0.95, "seed": number}
    length = {"max_completion_tokens": tokens, "min_tokens": tokens}
    return {"messages": messages, "temperature": 0.0, **length, **drawn}


def user(words: int, rng: random.Random) -> dict[str, str]:
    """Return a message of so many words."""
    return {"role": "user", "content": " ".join(rng.choices(bodies.WORDS, k=words))}


@dataclass
class ChatKind:
    """What all kinds of chat share: the comparison with the undisturbed run, and the answers kept for the audit."""

    name: ClassVar[str] = ""
    comparison: Comparison = field(default_factory=Comparison)
    wrong: list[str] = field(default_factory=list)

    async def alone(self, clients: Clients, body: dict[str, Any], *, greedy: bool) -> Known:
        """Ask while nothing else runs and remember the answer; RuntimeError if there is none."""
        answer = await clients.chat.ask({**body, **LOGPROBS}, first=0)
        if not answer.ok:
            raise RuntimeError(f"undisturbed: {answer.code} {answer.message} {answer.wrong}")
        return known_of(answer, greedy=greedy)

    async def ask(
        self, clients: Clients, body: dict[str, Any], done: Done, key: str
    ) -> StreamedAnswer:
        """Ask under faults, noting every moment at which a piece came, and each retrieval as it is told."""

        def seen(answer: StreamedAnswer) -> None:
            done.retrievals = (answer.retrieval or {}).get("retrievals", [])

        answer = await clients.chat.ask(body, key=key, seen=seen)
        done.beats_s += [*answer.at_s, time.monotonic()]
        done.tries += answer.tries
        return answer


@dataclass
class PooledChat(ChatKind):
    """Questions out of a `pool` of bodies with their undisturbed answers, which every answer must equal."""

    count: int = 6
    pool: list[tuple[dict[str, Any], Known]] = field(default_factory=list)

    async def once(self, clients: Clients, number: int, done: Done) -> str:
        """Ask one question of the pool."""
        body, known = self.pool[number % len(self.pool)]
        answer = await self.ask(clients, body, done, done.key)
        return self.comparison.judge(done.key, known, answer)

    async def audit(self, clients: Clients) -> list[str]:
        """Ask every question once more."""
        wrong = []
        for number in range(len(self.pool)):
            done = Done(self.name, f"audit-{self.name}-{number}", time.monotonic())
            verdict = await self.once(clients, number, done)
            wrong += [f"{self.name}: question {number}: {verdict}"] if verdict != "ok" else []
        return wrong


@dataclass
class Stream(ChatKind):
    """Single turns out of a pool, half of them greedy and half drawn, each equal to its undisturbed answer."""

    name: ClassVar[str] = "stream"
    count: int = 18
    pool: list[tuple[dict[str, Any], Known]] = field(default_factory=list)
    kept: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    async def prepare(self, clients: Clients) -> None:
        """Ask every request of the pool alone."""
        rng = random.Random(21)
        for number in range(self.count):
            greedy = number // len(TOKENS) % 2 == 0
            body = asked([user(rng.choice((5, 30, 120)), rng)], number, greedy=greedy)
            self.pool.append((body, await self.alone(clients, body, greedy=greedy)))

    async def once(self, clients: Clients, number: int, done: Done) -> str:
        """Stream one answer of the pool."""
        body, known = self.pool[number % len(self.pool)]
        answer = await self.ask(clients, body, done, done.key)
        if answer.ok:
            self.kept[done.key] = (body, answer.text)
        if len(self.kept) > 20:
            self.kept.pop(next(iter(self.kept)))
        return self.comparison.judge(done.key, known, answer)

    async def audit(self, clients: Clients) -> list[str]:
        """Ask the last ones again with their keys: what was delivered is what is stored."""
        wrong = []
        for key, (body, before) in self.kept.items():
            again = await clients.chat.ask(body, key=key)
            if not again.ok:
                wrong.append(f"stream: key {key} the second time: {_whole(again)}")
            elif again.text != before:
                wrong.append(f"stream: key {key} gives another answer the second time")
        return wrong


@dataclass
class Conversation(ChatKind):
    """Conversations by session, each turn equal to its undisturbed one; sessions hold exactly the finished turns."""

    name: ClassVar[str] = "conversation"
    count: int = 6
    turns: int = 3
    think_s: float = 0.05
    pool: list[list[tuple[dict[str, Any], Known]]] = field(default_factory=list)
    kept: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)

    async def prepare(self, clients: Clients) -> None:
        """Hold every conversation of the pool once."""
        rng = random.Random(22)
        for number in range(self.count):
            session, said = await self.open(clients), []
            greedy = number % 2 == 0
            for turn in range(self.turns):
                message = user(rng.choice((4, 12, 40)), rng)
                body = asked([message], number * 10 + turn, greedy=greedy)
                known = await self.alone(clients, body | {"session": session}, greedy=greedy)
                said.append((body, known))
            self.pool.append(said)

    async def open(self, clients: Clients) -> str:
        """Create a session; RuntimeError if no router does."""
        status, found = await clients.chat.call("POST", "/v1/sessions", {})
        if status not in {200, 201}:
            raise RuntimeError(f"no session: {status} {found}")
        return str(found["id"])

    async def once(self, clients: Clients, number: int, done: Done) -> str:
        """Hold one conversation of the pool in a session of its own, then look at the session."""
        said = self.pool[number % len(self.pool)]
        try:
            session = await self.open(clients)
        except RuntimeError as error:
            return str(error)
        done.beats_s.append(time.monotonic())
        turns: list[tuple[str, str]] = []
        parted = False
        for turn, (body, known) in enumerate(said):
            if turn:
                done.pausing = True
                await asyncio.sleep(self.think_s)
                done.pausing = False
            key = f"{done.key}-{turn}"
            answer = await self.ask(clients, body | {"session": session}, done, key)
            before = len(self.comparison.differences)
            # Once a turn has parted (where it may), the later ones have another history.
            verdict = _whole(answer) if parted else self.comparison.judge(key, known, answer)
            parted = parted or len(self.comparison.differences) > before
            if verdict != "ok":
                return f"turn {turn} of {session}: {verdict}"
            turns.append((body["messages"][0]["content"], answer.text))
        verdict = await self._look(clients, session, turns)
        if number % 4 == 0 and verdict == "ok":
            done.answered_s = time.monotonic()  # the proof reads all of Redis, killed or not
            return await self._delete(clients, session)
        self._keep(session, turns)
        return verdict

    def _keep(self, session: str, turns: list[tuple[str, str]]) -> None:
        self.kept[session] = turns
        if len(self.kept) > 40:
            self.kept.pop(next(iter(self.kept)))

    async def _look(self, clients: Clients, session: str, turns: list[tuple[str, str]]) -> str:
        status, found = await clients.chat.call("GET", f"/v1/sessions/{session}")
        if status != 200:
            return f"session {session}: status {status} {found}"
        if (found["version"], found["turns"]) != (len(turns), len(turns)):
            return f"session {session} has version {found['version']} and {found['turns']} turns of {len(turns)}"
        return "ok"

    async def _delete(self, clients: Clients, session: str) -> str:
        status, found = await clients.chat.call("DELETE", f"/v1/sessions/{session}")
        # A try whose answer was lost may have done it.
        if status not in {200, 404}:
            return f"delete of {session}: status {status} {found}"
        self.gone.append(session)
        return "ok"

    async def audit(self, clients: Clients) -> list[str]:
        """Export the sessions kept: exactly the turns held, in order, with their answers; the deleted are gone."""
        wrong = []
        for session, turns in self.kept.items():
            status, found = await clients.chat.call("GET", f"/v1/sessions/{session}/export")
            stored = said_in(found) if status == 200 else []
            if stored != turns:
                wrong.append(f"session {session} holds {stored!r:.300}, said was {turns!r:.300}")
        for session in self.gone[-20:]:
            status, _ = await clients.chat.call("GET", f"/v1/sessions/{session}")
            wrong += [f"session {session} was deleted and is there"] if status != 404 else []
        return wrong


def _whole(answer: StreamedAnswer) -> str:
    return "ok" if answer.ok else f"{answer.code} {answer.message} {answer.wrong}"


def said_in(exported: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each turn of an exported session: what the user said and what was answered."""
    return [(turn["messages"][-1]["content"], turn["answer"]) for turn in exported["turns"]]
