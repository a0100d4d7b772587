"""Messages to jobs that are queued or running."""

from __future__ import annotations

from typing import Literal

from common.bus import keys, metrics
from common.bus.connection import Connection
from common.bus.jobs import Jobs
from common.ids import family_of


class Control:
    """Cancels jobs, whether they are queued or running."""

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
                keys.room(family),
            ]
            verdict: Literal["removed", "flagged", "over", "unknown", "moved"]
            verdict = (await self._redis.script("cancel", names, [job, state.lane])).decode()
            if verdict == "removed":
                metrics.ended(family, state.lane, "cancelled")
            if verdict != "moved":
                return verdict
        return "flagged"
