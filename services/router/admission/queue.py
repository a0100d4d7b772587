"""The admission queue: refused submissions wait here, and are woken one by one, oldest first, when there is room."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

from common.bus import Notifications
from common.ids import Family
from common.tasks import wait

# The time between tries: a notification may be lost, and a lane may have room without one (a worker's depth grew).
AGAIN_S = 2.0
# The first and the longest pause after a refusal: a busy lane is not tried whenever one of its jobs ends.
_FIRST_S, _MOST_S = 0.01, 0.1

Line = tuple[Family, float]


class AdmissionQueue:
    """This router's waiting submissions: one line for each family and share of a lane's depth."""

    def __init__(self, notifications: Notifications, again_s: float = AGAIN_S) -> None:
        self.notifications, self.again_s = notifications, again_s
        self.lines: defaultdict[Line, list[Ticket]] = defaultdict(list)
        self.trying: defaultdict[Family, set[Ticket]] = defaultdict(set)
        notifications.on_room = self.wake

    def wake(self, family: Family) -> None:
        """Wake the first ticket of each of a family's lines, and every ticket that is in a try at this moment."""
        for ticket in self.trying.get(family, ()):
            ticket.turn.set()
        for (of, _), line in self.lines.items():
            if of == family:
                line[0].turn.set()


class Ticket:
    """One submission's place in the queue: `begin` before each try, `wait` after a refusal, `leave` at the end.

    The ticket stands in the line from its first `wait` until `leave`.
    """

    def __init__(self, queue: AdmissionQueue, family: Family, share: float) -> None:
        self._queue, self._family, self._line = queue, family, (family, share)
        self._stands = False
        self._pause_s = _FIRST_S
        self.turn = asyncio.Event()

    def begin(self) -> None:
        """Begin a try: a notification after this call ends the next `wait`."""
        self._queue.notifications.listen(self._family)
        self.turn.clear()
        self._queue.trying[self._family].add(self)

    async def wait(self, most_s: float) -> None:
        """Wait for room and this ticket's turn, at most for `most_s` or until it is time to try again."""
        self._end_try()
        if not self._stands:
            self._stands = True
            self._queue.lines[self._line].append(self)
        most_s = min(max(most_s, 0.0), self._queue.again_s * random.uniform(0.75, 1.0))
        pause_s = min(self._pause_s * random.uniform(0.5, 1.0), most_s)
        self._pause_s = min(2 * self._pause_s, _MOST_S)
        await asyncio.sleep(pause_s)
        await wait(self.turn, most_s - pause_s)

    def leave(self) -> None:
        """Leave the queue, whatever the outcome; the next in line takes its turn."""
        self._end_try()
        if not self._stands:
            return
        self._stands = False
        line = self._queue.lines[self._line]
        line.remove(self)
        if line:
            line[0].turn.set()
        else:
            del self._queue.lines[self._line]

    def _end_try(self) -> None:
        trying = self._queue.trying.get(self._family, set())
        trying.discard(self)
        if not trying:
            self._queue.trying.pop(self._family, None)
