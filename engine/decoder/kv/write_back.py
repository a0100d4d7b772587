"""Write-back: puts pages into the tiers below the host, for sessions that return, and before the host evicts pages."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from common import log
from common.clock import SYSTEM, Clock
from common.pages.codec import Header
from common.pages.identity import Owner, PageId
from common.pages.store import PageKey, PageStore, TierDown
from common.types.pages import PagePublish
from engine.decoder.executor.interface import ModelShape, PageCopier
from engine.decoder.kv.tiers import PageTiers
from engine.decoder.sequence import TokenSequence

AT_ONCE = 16
# The most pages that wait to be put, and the most with a remembered place and owner; the oldest are forgotten.
WAITING = 1 << 16
_AGAIN_S = 1.0
_IDLE_S = 0.5
_REFUSED_S = 10.0  # the pause before a page beyond its owner's limit is tried again
_WEIGHT = 0.05  # of the newest page in the mean time
_NOBODY = bytes(16)
_log = log.get("engine")


class _Place(NamedTuple):
    """The place of a page in its sequence, and its owner."""

    parent: PageId
    depth: int
    owner: Owner


class WriteBack:
    """Puts one worker's pages into lower tiers; `policy` selects pages to put before the host must evict them.

    `through`: all full pages of an ended turn; `selective`: those of sessions that have returned before, while no cores
    compute that puts would take time of; `back`: none.
    """

    def __init__(
        self,
        store: PageStore,
        tiers: PageTiers,
        copier: PageCopier,
        shape: ModelShape,
        policy: PagePublish,
        ttl_s: float,
        competes: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        """`competes` tells whether puts take time of cores that compute now."""
        self._store, self._tiers, self._copier, self._shape = store, tiers, copier, shape
        self._policy, self._ttl_s, self._now_s = policy, ttl_s, clock.monotonic
        self._competes = competes
        self.put: Counter[str] = Counter()  # pages by outcome
        self.put_s = 0.0  # recent mean seconds to put a page
        self._waiting: OrderedDict[PageId, _Place] = OrderedDict()
        self._known: OrderedDict[PageId, _Place] = OrderedDict()
        self._refused: set[PageKey] = set()
        self._forget_at = 0.0
        self._work = asyncio.Event()
        self._putting = asyncio.Lock()

    async def forget(self, ids: Iterable[PageId]) -> None:
        """Forget pages that wait to be put; return once no write of them is in progress."""
        async with self._putting:
            for page_id in ids:
                self._waiting.pop(page_id, None)
                self._known.pop(page_id, None)

    def ended(self, sequence: TokenSequence) -> None:
        """Record a sequence that is about to leave, so that its full pages may be put."""
        goes = self._policy == "through" or (self._policy == "selective" and sequence.cached > 0)
        parent = sequence.root
        for depth, page_id in enumerate(sequence.ids):
            place = self._known[page_id] = _Place(parent, depth, sequence.owner)
            if goes:
                self._waiting[page_id] = place
            parent = page_id
        for places in (self._waiting, self._known):
            while len(places) > WAITING:
                places.popitem(last=False)
        if goes:
            self._work.set()

    async def drain(self, seconds: float) -> None:
        """Put all pages of this worker, the latest turns' first, until all are put or `seconds` are over."""
        give_up = self._now_s() + seconds
        async with self._putting:
            self._waiting = OrderedDict(reversed(self._known.items()))
            while self._waiting and self._now_s() < give_up:
                if not await self._put_some(self._take_waiting()):
                    return

    async def run(self) -> None:
        """Put pages until cancelled; while the tier is away or full, pause between tries."""
        while True:
            async with self._putting:
                later = self._policy == "selective" and self._competes()
                went = await self._put_some({} if later else self._take_waiting())
            if went is None:
                self._work.clear()
                await self._wait()
            elif not went:
                await asyncio.sleep(_AGAIN_S)

    async def _wait(self) -> None:
        """Wait up to `_IDLE_S` for a sequence that leaves; pages close to eviction send no notice."""
        try:
            async with asyncio.timeout(_IDLE_S):
                await self._work.wait()
        except TimeoutError:
            return

    async def _put_some(self, waited: dict[PageId, _Place]) -> bool | None:
        """Put pages that have waited, or else sinking ones; False if the tier is away or full, None without any."""
        some = self._keyed(waited) or self._sinking()
        if not some:
            return None
        try:
            went = await self._put(some)
        except TierDown as error:
            _log.warning("pages_not_put", error=str(error))
            went = False
        if not went:  # retried after the other pages, which another node may take
            self._waiting = OrderedDict([*self._waiting.items(), *waited.items()])
        return went

    def _take_waiting(self) -> dict[PageId, _Place]:
        """Take the next pages that wait to be put."""
        count = min(AT_ONCE, len(self._waiting))
        return dict(self._waiting.popitem(last=False) for _ in range(count))

    def _keyed(self, places: dict[PageId, _Place]) -> dict[PageKey, _Place]:
        groups = range(len(self._shape.windows))
        return {PageKey(page, group): place for page, place in places.items() for group in groups}

    def _sinking(self) -> dict[PageKey, _Place]:
        if self._now_s() >= self._forget_at:
            self._refused.clear()
        some = {}
        for group in range(len(self._shape.windows)):
            for page_id in self._tiers.sinking(group, AT_ONCE + len(self._refused)):
                if (key := PageKey(page_id, group)) not in self._refused:
                    some[key] = self._place(page_id)
        return some

    def _place(self, page_id: PageId) -> _Place:
        depth = self._tiers.history.depth(page_id)
        return self._known.get(page_id, _Place(_NOBODY, depth, b""))

    async def _put(self, some: dict[PageKey, _Place]) -> bool:
        """Put the pages that the tier lacks; False if the tier has no room."""
        keys = list(some)
        for key, tier in zip(keys, await self._store.where(keys), strict=True):
            if tier is None:
                began_s = self._now_s()
                held = self._tiers.hold(key.group, key.id)
                if held is None:
                    continue  # neither device nor host has the page any more
                try:
                    value = await self._copier.value(self._header(key, some[key]), *held)
                finally:
                    self._tiers.let_go(key.group, *held)
                outcome = await self._store.put(key, value, self._ttl_s, some[key].owner)
                self.put[outcome] += 1
                took_s = self._now_s() - began_s
                self.put_s += (took_s - self.put_s) * (_WEIGHT if self.put_s else 1.0)
                if outcome == "full":
                    return False
                if outcome == "over":  # only this owner's limit is reached
                    self._refuse(key)
                    continue
            self._tiers.sunk(key.group, key.id)
        return True

    def _refuse(self, key: PageKey) -> None:
        if not self._refused:
            self._forget_at = self._now_s() + _REFUSED_S
        self._refused.add(key)

    def _header(self, key: PageKey, place: _Place) -> Header:
        layers, layer_bytes = self._copier.layout(key.group)
        return Header(
            id=key.id,
            parent=place.parent,
            depth=place.depth,
            layers=layers,
            layer_bytes=layer_bytes,
            group=key.group,
        )
