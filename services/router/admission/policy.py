"""Which lanes embeddings may take and by what rule: WindVE's policies, and the way back that promises allow for."""

from __future__ import annotations

from collections.abc import Sequence

from common.bus.admission import Terms
from common.config import Admission
from common.cost.online import Lateness

EMBED_CLASSES = ("gpu", "cpu")
LOW_SHARE = 0.5
_TERMS: dict[Admission, Terms] = {
    "windve-tokens": Terms("finish", "first"),
    "windve": Terms("count", "first"),
    "accelerator-only": Terms("count", "first"),
    "round-robin": Terms("count", "turns"),
}
_HOP_PRIOR_S, _HOP_MOST_S = 0.005, 0.1


class DeliveryLatency:
    """How long it takes from a job's end to its client: p99 of the journal's delay + p99 of making the reply."""

    def __init__(self) -> None:
        self._heard = Lateness(0.99, window=1000, prior=_HOP_PRIOR_S)
        self._replied = Lateness(0.99, window=1000)

    def heard(self, seconds: float) -> None:
        """Note the time from the end of a job to its router's knowing."""
        self._heard.add(seconds)

    def replied(self, seconds: float) -> None:
        """Note the time from there to the reply."""
        self._replied.add(seconds)

    @property
    def p99_s(self) -> float:
        """The seconds a promise has to allow for; one stall of this router must not close its door for long."""
        return min(self._heard.value + self._replied.value, _HOP_MOST_S)


class LanePolicy:
    """What `admit` is asked for embeddings; other lanes are always filled by predicted end."""

    def __init__(self, name: Admission, hops: DeliveryLatency) -> None:
        self.name: Admission = name
        self.hops = hops

    def classes(self, asked: Sequence[str]) -> Sequence[str]:
        """Return the classes that a request for `asked` may take, in order."""
        if tuple(asked) == EMBED_CLASSES and self.name == "accelerator-only":
            return EMBED_CLASSES[:1]
        return asked

    def terms(self, asked: Sequence[str]) -> Terms:
        """Return by what rule they are chosen."""
        name: Admission = self.name if tuple(asked) == EMBED_CLASSES else "windve-tokens"
        return _TERMS[name]._replace(hop_s=self.hops.p99_s)
