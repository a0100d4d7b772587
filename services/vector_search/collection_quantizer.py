"""The quantizer of one collection in one process: shards code their rows by it, QuantizerExchange publishes it."""

from __future__ import annotations

import threading
from collections import defaultdict

from services.vector_search.index.quantizer_source import TrainedQuantizer


class CollectionQuantizer:
    """The quantizer that a collection's shards in this process share; shards and the exchange call from two threads.

    A shard that wants to train asks, is woken once only this process may train, trains, and offers its quantizer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: TrainedQuantizer | None = None
        self._offered = False
        self.needed = False  # whether a shard here has lists, or wants some
        self.wanted = False  # whether a shard asked to train
        self.granted = False

    # -- for shards

    def current(self) -> TrainedQuantizer | None:
        """Return the quantizer to code rows by; None while this process has none."""
        self.needed = True
        return self._now

    def may_train(self) -> bool:
        """Return whether only this process may train now; if not, ask the exchange for the right to train."""
        with self._lock:
            self.wanted = not self.granted
            return self.granted

    def offer(self, made: TrainedQuantizer) -> None:
        """Use a quantizer here at once; the exchange publishes it."""
        with self._lock:
            self._now, self._offered = made, True

    def give_up(self) -> None:
        """Let another process train."""
        with self._lock:
            self.wanted = self.granted = False

    # -- for the exchange

    @property
    def named(self) -> tuple[str, int]:
        """The hash of this process' quantizer ("" without one), and the number of lists that its training was asked
        for.

        Both are compared: with few rows, trainings for 24 and for 32 lists may give the same quantizer.
        """
        now = self._now
        return ("", 0) if now is None else (now.quantizer.version, now.asked)

    @property
    def offered(self) -> TrainedQuantizer | None:
        """The quantizer that was trained here and is not published yet; None without one."""
        with self._lock:
            return self._now if self._offered else None

    def grant(self) -> None:
        """Let a shard of this process train."""
        with self._lock:
            self.wanted, self.granted = False, True

    def published(self) -> None:
        """Note that the offered quantizer was published, or came too late: then another one replaces it soon."""
        with self._lock:
            self._offered = self.wanted = self.granted = False

    def take(self, made: TrainedQuantizer) -> None:
        """Use the quantizer that another process published."""
        with self._lock:
            if not self._offered:
                self._now, self.wanted, self.granted = made, False, False


class CollectionQuantizers:
    """The quantizers of all collections in this process, by the collection's id."""

    def __init__(self) -> None:
        self._known: defaultdict[str, CollectionQuantizer] = defaultdict(CollectionQuantizer)

    def of(self, collection: str) -> CollectionQuantizer:
        """Return a collection's CollectionQuantizer, made at the first call."""
        return self._known[collection]

    def needed(self) -> dict[str, CollectionQuantizer]:
        """Return, by collection, those that shards of this process use or want."""
        return {name: each for name, each in list(self._known.items()) if each.needed}

    def forget(self, collection: str) -> None:
        """Forget a collection that is gone."""
        self._known.pop(collection, None)
