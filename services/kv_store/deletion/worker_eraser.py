"""The worker eraser: has workers forget a deleted session's pages on devices and hosts, and reports their answers."""

from __future__ import annotations

from common.bus import Bus, BusFull
from common.ids import Family, family_of
from common.registry.deletion import Deletions
from common.wire.registry import Forgot
from services.kv_store.deletion.page_eraser import ErasedPages
from services.kv_store.pages.session_pages import session_pages

WAIT_S = 2.0


class WorkerEraser:
    """Notifies the workers of a session's family, and waits up to `wait_s` for the answers of living workers."""

    def __init__(self, bus: Bus, wait_s: float = WAIT_S) -> None:
        self._bus, self._wait_s = bus, wait_s

    async def erase(self, session: str, *, goes_on: bool = False) -> ErasedPages:
        """Have workers forget the pages of a session's turns; return how many they had. Raises BusDown.

        Workers drop the session's running turn, unless the session `goes_on`.
        """
        family, done = family_of(session), ErasedPages()
        try:
            entry = await Deletions(self._bus).announce(
                session, await session_pages(self._bus, session), goes_on=goes_on
            )
        except BusFull:
            done.not_searched.append(
                "the bus was full: workers hold the session's pages until other pages take their place"
            )
            return done
        answers, silent = await self._answers(family, entry)
        done.pages = sum(max(each.device, each.host) for each in answers)
        lines = [
            {
                "pattern": f"{each.looked} pages of its turns",
                "in": f"device and host of {each.worker}",
                "read": each.looked,
                "found": 0,
            }
            for each in answers
        ]
        looked = sum(each.looked for each in answers)
        told = {"store": "workers", "servers": len(answers), "keys": looked, "searched": lines}
        done.stores.append(told)
        done.not_searched += [
            f"{worker} did not answer: it forgets the session's pages as soon as it reads that it must"
            for worker in silent
        ]
        return done

    async def _answers(self, family: Family, entry: str) -> tuple[list[Forgot], list[str]]:
        """Wait for answers; return the answers, and the living workers that gave none."""
        clock = self._bus.clock
        until = clock.monotonic() + self._wait_s
        while True:
            answers = await Deletions(self._bus).answers(family, entry)
            told = {each.worker for each in answers}
            alive = {record.worker for record in await self._bus.workers.living(family)}
            left_s = until - clock.monotonic()
            if alive <= told or left_s <= 0:
                return sorted(answers, key=lambda each: each.worker), sorted(alive - told)
            await Deletions(self._bus).await_answer(family, entry, left_s)
