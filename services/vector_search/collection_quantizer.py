"""The quantizer of one collection in one process: its shards code their rows by it, the exchange keeps it in step."""

from __future__ import annotations

import threading
from collections import defaultdict

from services.vector_search.index.quantizer_source import TrainedQuantizer


class CollectionQuantizer:
    """What the shards of a collection in this process share; they ask from one thread, the exchange from another.

    A shard that wants to train asks, is woken once this process alone may, trains, and offers what it made.
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
        """Return the quantizer to code rows by, None while there is none here."""
        self.needed = True
        return self._now

    def may_train(self) -> bool:
        """Return whether this process alone may train now; if not, that is asked for."""
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
        """The hash of the quantizer that is here, "" if there is none, and how many lists it was asked for.

        Rows that are few give the same quantizer whether 24 lists are asked for or 32.
        """
        now = self._now
        return ("", 0) if now is None else (now.quantizer.version, now.asked)

    @property
    def offered(self) -> TrainedQuantizer | None:
        """What was trained here and is not published yet."""
        with self._lock:
            return self._now if self._offered else None

    def grant(self) -> None:
        """Let a shard of this process train."""
        with self._lock:
            self.wanted, self.granted = False, True

    def published(self) -> None:
        """Note that what was offered is the collection's, or came too late: another takes its place soon."""
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
        """Return a collection's, made at the first call."""
        return self._known[collection]

    def needed(self) -> dict[str, CollectionQuantizer]:
        """Return those that shards here code their rows by."""
        return {name: each for name, each in list(self._known.items()) if each.needed}

    def forget(self, collection: str) -> None:
        """Forget a collection that is gone."""
        self._known.pop(collection, None)
