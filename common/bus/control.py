"""Messages to jobs that are queued or running: cancel, pause, extend."""

from __future__ import annotations

from typing import Literal, NamedTuple

from common.bus import keys, metrics, unreadable
from common.bus.connection import BLOCK_MS, Connection
from common.bus.jobs import Jobs
from common.ids import Family, family_of
from common.redis.replies import hash_of
from common.wire.control import Control as ControlMessage
from common.wire.control import Extend, decode_control
from common.wire.message import BadMessage, encode

MOST_MESSAGES = 64  # messages to one job that its worker has not taken
MOST_BYTES = 1 << 20  # size of one message
_READ = 256  # entries of an inbox in one read


class ControlState(NamedTuple):
    """The messages to a job that its worker has not taken: extensions by rising number, and whether it is paused."""

    extensions: list[Extend]
    paused: bool


class Control:
    """Cancels jobs, whether they are queued or running, and keeps the messages to their workers."""

    def __init__(self, redis: Connection, jobs: Jobs) -> None:
        self._redis, self._jobs = redis, jobs

    async def cancel(self, job: str) -> Literal["removed", "flagged", "over", "unknown"]:
        """Cancel a job: a job that no worker holds is removed, any other is flagged for its worker's next step."""
        family = family_of(job)
        for _ in range(10):  # a job may be moved to another lane between the read and the script
            state = await self._jobs.get(job)
            if state is None:
                return "unknown"
            names = [
                keys.use(family),
                keys.job(job),
                keys.log(job),
                keys.lane(family, state.lane),
                keys.journal(family, state.router),
                keys.inbox(family),
                keys.room(family),
            ]
            verdict: Literal["removed", "flagged", "over", "unknown", "moved"]
            verdict = (await self._redis.script("cancel", names, [job, state.lane])).decode()
            if verdict == "removed":
                metrics.ended(family, state.lane, "cancelled")
            if verdict != "moved":
                return verdict
        return "flagged"

    async def send(
        self, job: str, message: ControlMessage
    ) -> Literal["sent", "known", "full", "over", "unknown"]:
        """Keep a message for the worker that has the job or takes it later, and wake that worker.

        "known" if the same number was sent before, or the job is already paused or resumed, as the message asks; "full"
        if the worker has not taken MOST_MESSAGES other messages; "over" if the job has ended. ValueError if the message
        has no number, or more than MOST_BYTES.
        """
        number = message.number if isinstance(message, Extend) else 0
        data = encode(message)
        if len(data) > MOST_BYTES or (isinstance(message, Extend) and number < 1):
            raise ValueError(
                f"message {number} to {job} has {len(data)} bytes; expected a number from 1 on, and "
                f"at most {MOST_BYTES} bytes"
            )
        pause = not isinstance(message, Extend) and not message.resume
        family = family_of(job)
        names = [keys.use(family), keys.job(job), keys.control(job), keys.inbox(family)]
        args = [job, number, data, "1" if pause else "0", MOST_MESSAGES]
        verdict: Literal["sent", "known", "full", "over", "unknown"]
        verdict = (await self._redis.script("send", names, args)).decode()
        return verdict

    async def state(self, job: str) -> ControlState:
        """Return the messages to a job that its worker has not taken."""
        found = hash_of(await self._redis.call("HGETALL", keys.control(job)))
        extensions = []
        for field, data in found.items():
            if not field.isdigit():
                continue
            try:
                message = decode_control(data)
            except BadMessage as error:
                unreadable.note("control", str(error), job=job)
                continue
            if isinstance(message, Extend):
                extensions.append(message)
        extensions.sort(key=lambda extend: extend.number)
        return ControlState(extensions, found.get(b"paused") == b"1")

    async def taken(self, job: str, number: int) -> None:
        """Drop the messages to a job up to `number`, whose effects are in the job's log."""
        names = [keys.use(family_of(job)), keys.control(job)]
        await self._redis.script("taken", names, [number])

    async def last(self, family: Family) -> str:
        """Return the id of the last entry of a family's inbox, from which `named` continues."""
        rows = await self._redis.call("XREVRANGE", keys.inbox(family), "+", "-", "COUNT", 1)
        return str(rows[0][0].decode()) if rows else "0-0"

    async def named(self, family: Family, after: str) -> tuple[str, list[str]]:
        """Wait up to a second for entries of a family's inbox; return the id of the last one, and the jobs in them."""
        command = ("XREAD", "COUNT", _READ, "BLOCK", BLOCK_MS, "STREAMS", keys.inbox(family))
        jobs = []
        for _, rows in await self._redis.blocking(*command, after) or ():
            for entry, flat in rows:
                after = entry.decode()
                if len(flat) == 2:
                    jobs.append(flat[1].decode(errors="replace"))
        return after, jobs
