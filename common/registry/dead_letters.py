"""Dead letters: jobs convicted of failing, with their errors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from common.bus import Bus, keys, unreadable
from common.ids import Family, family_of
from common.wire.registry import DeadLetter

LETTERS = 20  # letters read at once: each holds its job


class DeadLetters:
    """Convicted jobs of all families."""

    def __init__(self, bus: Bus) -> None:
        self._redis = bus.connection

    async def all(self, family: Family | None = None) -> list[DeadLetter]:
        """Return dead letters, oldest first, of one family or of all."""
        letters = []
        for name in [keys.dead(family)] if family else await self._scan("*:dead"):
            for row in await self._redis.call("XRANGE", name, "-", "+"):
                letter = _letter(row[1])
                if letter is not None:
                    letters.append(letter)
        return sorted(letters, key=lambda letter: letter.at_ms)

    async def count(self, family: Family) -> int:
        """Return the number of dead letters that a family keeps."""
        return int(await self._redis.call("XLEN", keys.dead(family)))

    async def families(self) -> list[Family]:
        """Return the families that keep dead letters, found by a scan of all keys."""
        found = []
        for name in await self._scan("{*}:dead"):
            with contextlib.suppress(ValueError):  # a key of another program
                family = keys.family_of_key(name)
                if await self.count(family):
                    found.append(family)
        return found

    async def drop(self, job: str) -> bool:
        """Delete a job's dead letter; False if the job has none."""
        name, letters = keys.dead(family_of(job)), keys.letters(family_of(job))
        entries = await self._redis.call("HGET", letters, job)
        if entries is None:  # an earlier version's letter is not indexed yet
            await self.index(family_of(job))
            entries = await self._redis.call("HGET", letters, job)
        if entries is None:
            return False
        dropped = bool(await self._redis.call("XDEL", name, *entries.split()))
        await self._redis.call("HDEL", letters, job)
        return dropped

    async def index(self, family: Family) -> int:
        """Index a family's dead letters by job, as earlier versions did not; return the number of letters of stages.

        The call may be repeated.
        """
        start, stages = "-", 0
        names = [keys.letters(family)]
        while rows := await self._redis.call(
            "XRANGE", keys.dead(family), start, "+", "COUNT", LETTERS
        ):
            for entry, flat in rows:
                job = dict(zip(flat[::2], flat[1::2], strict=True)).get(b"job", b"")
                await self._redis.script("index", names, [job, entry])
                stages += b"." in job.rpartition(b"~")[2]
            start = "(" + rows[-1][0].decode()
        return stages

    async def _scan(self, pattern: str) -> list[str]:
        found: set[str] = set()
        for call in self._redis.callers():
            cursor = b"0"
            while True:
                cursor, names = await call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
                found |= {name.decode() for name in names}
                if cursor in {b"0", 0}:
                    break
        return sorted(found)


def _letter(flat: Sequence[bytes]) -> DeadLetter | None:
    """Return one entry of a family's dead letters; None, counted and logged, if it is unreadable."""
    f = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        return DeadLetter(
            job=f[b"job"].decode(),
            tenant=f[b"tenant"].decode(),
            payload=f[b"payload"],
            items=int(f[b"items"]),
            tokens=int(f[b"tokens"]),
            code=f[b"code"].decode(),
            message=f[b"message"].decode(errors="replace"),
            trace=f[b"trace"].decode(errors="replace"),
            attempts=int(f[b"attempts"]),
            at_ms=int(f[b"at"]),
        )
    except (KeyError, ValueError) as error:
        unreadable.note("dead", repr(error))
        return None
