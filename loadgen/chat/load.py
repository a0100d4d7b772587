"""Chat in an open or a closed loop: conversations arrive, and each says its next turn after the answer and a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from loadgen.bodies import Request
from loadgen.chat.answer import StreamedAnswer
from loadgen.chat.client import Chat
from loadgen.chat.replies import Goal, Reply, reply, summary
from loadgen.chat.scripts import Say, Script
from loadgen.loop import LoadLoop
from loadgen.target import Target

How = Literal["session", "stateless"]


@dataclass(frozen=True, slots=True)
class Asking:
    """The form of the turns' requests: by session or with the whole history, greedy or drawn, grounded or not.

    With `exact_length` an answer has exactly the number of tokens of its script, for any model.
    """

    how: How = "session"
    model: str = ""
    temperature: float = 0.0
    exact_length: bool = True
    retrieval: dict[str, Any] | None = None

    def body(self, script: Script, say: Say) -> dict[str, Any]:
        """Return the fields that all requests of turns share."""
        body: dict[str, Any] = {
            "max_completion_tokens": say.max_tokens,
            "temperature": self.temperature,
            "seed": script.number,
        }
        body |= {"model": self.model} if self.model else {}
        # Stop tokens are banned, not ignored: they have no text, so they would leave the stream silent.
        body |= {"min_tokens": say.max_tokens} if self.exact_length else {}
        return body | ({"retrieval": self.retrieval} if self.retrieval else {})


@dataclass(slots=True)
class Talk:
    """The results of a loop of conversations; `cpu_s` are the load generator's own CPU seconds."""

    replies: list[Reply] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    def summary(self, goal: Goal) -> dict[str, Any]:
        """Return the run's figures."""
        return summary(self.replies, self.seconds, goal, self.cpu_s)


class ChatLoad(LoadLoop[Talk]):
    """Runs conversations against routers; a conversation of one turn is a plain request, without a session."""

    def __init__(
        self, chat: Chat, target: Target, conversations: Iterator[Script], asking: Asking
    ) -> None:
        super().__init__(Talk())
        self._chat, self._target = chat, target
        self._scripts = conversations
        self._asking = asking

    @property
    def replies(self) -> list[Reply]:
        """Return the replies so far, for live progress."""
        return self.run.replies

    def fresh(self) -> Talk:
        """Return an empty run."""
        return Talk()

    def full(self, due: float, now: float) -> None:
        """Record an arrival that found too many conversations open."""
        self.replies.append(Reply("chat", 0, due, now, now, 0, "loadgen_full"))

    async def one(self, due: float) -> None:
        """Run one conversation, to its end or to the first turn that fails."""
        script = next(self._scripts)
        single = len(script.says) == 1
        kind = "chat" if single else "multi-turn"
        session, history = "", list[dict[str, str]]()
        if not single and self._asking.how == "session":
            session, failed = await self._open(due)
            if failed is not None:
                self.replies.append(failed)
                return
        for turn, say in enumerate(script.says):
            if turn:
                await asyncio.sleep(say.think_s)
                due = self.now()
            new = {"role": "user", "content": say.text}
            body = self._asking.body(script, say)
            body["messages"] = [new] if session else [*history, new]
            body |= {"session": session} if session else {}
            sent = self.now()
            answer = await self._chat.ask(body)
            self.replies.append(self._reply(answer, kind, turn, due, sent))
            if not answer.ok:
                return
            history += [new, {"role": "assistant", "content": answer.text}]

    def _reply(
        self, answer: StreamedAnswer, kind: str, turn: int, due: float, sent: float
    ) -> Reply:
        done = self.now()
        return reply(answer, kind=kind, turn=turn, began=self.began, due=due, sent=sent, done=done)

    async def _open(self, due: float) -> tuple[str, Reply | None]:
        """Create a session; return its id, or the failure."""
        sent = self.now()
        body = {"model": self._asking.model} if self._asking.model else {}
        found = await self._target.send(Request("/v1/sessions", msgspec.json.encode(body), 0))
        if 200 <= found.status < 300:
            return str(msgspec.json.decode(found.body)["id"]), None
        code = found.code or "no_session"
        return "", Reply("multi-turn", 0, due, sent, self.now(), found.status, code)
