"""Who waits for room in a family's lanes: woken one by one, oldest first, by the word of the bus that room appeared."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

from common.bus import Notifications
from common.ids import Family
from common.tasks import wait

# Should a word be lost, or room appear without one (a worker's depth grew), who waits tries again after so long.
AGAIN_S = 2.0
# After a refusal the next word is heeded a little later, so that a busy lane is not asked at every end of a job.
_FIRST_S, _MOST_S = 0.01, 0.1

Line = tuple[Family, float]


class Room:
    """The lines of this router: one for each family and share of a lane's depth."""

    def __init__(self, journal: Notifications, again_s: float = AGAIN_S) -> None:
        self.journal, self.again_s = journal, again_s
        self.lines: defaultdict[Line, list[Place]] = defaultdict(list)
        self.trying: defaultdict[Family, set[Place]] = defaultdict(set)
        journal.on_room = self.wake

    def place(self, family: Family, share: float) -> Place:
        """Return a place for one waiter; it stands in the line from its first `wait` until it leaves."""
        return Place(self, family, share)

    def wake(self, family: Family) -> None:
        """Wake the first of each line of a family, and whoever is being refused at this moment."""
        for place in self.trying.get(family, ()):
            place.turn.set()
        for (of, _), line in self.lines.items():
            if of == family:
                line[0].turn.set()


class Place:
    """One waiter: `look` before each try, `wait` after a refusal, `leave` at the end, whatever it was."""

    def __init__(self, room: Room, family: Family, share: float) -> None:
        self._room, self._family, self._line = room, family, (family, share)
        self._stands = False
        self._pause_s = _FIRST_S
        self.turn = asyncio.Event()

    def look(self) -> None:
        """Begin a try: a word that comes from now on counts."""
        self._room.journal.listen(self._family)
        self.turn.clear()
        self._room.trying[self._family].add(self)

    async def wait(self, most_s: float) -> None:
        """Wait for the word that room appeared and for this one's turn; at most `most_s` or the time to try again."""
        self._tried()
        if not self._stands:
            self._stands = True
            self._room.lines[self._line].append(self)
        most_s = min(max(most_s, 0.0), self._room.again_s * random.uniform(0.75, 1.0))
        pause_s = min(self._pause_s * random.uniform(0.5, 1.0), most_s)
        self._pause_s = min(2 * self._pause_s, _MOST_S)
        await asyncio.sleep(pause_s)
        await wait(self.turn, most_s - pause_s)

    def leave(self) -> None:
        """End the waiting; the next in line takes its turn."""
        self._tried()
        if not self._stands:
            return
        self._stands = False
        line = self._room.lines[self._line]
        line.remove(self)
        if line:
            line[0].turn.set()
        else:
            del self._room.lines[self._line]

    def _tried(self) -> None:
        trying = self._room.trying.get(self._family, set())
        trying.discard(self)
        if not trying:
            self._room.trying.pop(self._family, None)
