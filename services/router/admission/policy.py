"""Lane policy: the classes of lanes that each kind of work may take, and WindVE's rules for the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.bus.admission import Terms
from common.config import Admission
from common.cost.online import Lateness
from common.ids import Family

EMBED_CLASSES = ("gpu", "cpu")
GENERATE_CLASSES = ("gpu",)
SEARCH_CLASSES = ("cpu",)
REQUEST_CLASSES = ("router",)
SESSION_CLASSES = ("kv",)
SESSIONS = Family("sessions")
CLASSES_OF: Mapping[str, Sequence[str]] = {
    "embed": EMBED_CLASSES,
    "rerank": EMBED_CLASSES,
    "chat": GENERATE_CLASSES,
    "search": SEARCH_CLASSES,
    "request": REQUEST_CLASSES,
    "sessions": SESSION_CLASSES,
}  # by the kind of a family
LOW_SHARE = 0.5  # of a lane's depth, for requests of low priority
_TERMS: dict[Admission, Terms] = {
    "windve-tokens": Terms("finish", "first"),
    "windve": Terms("count", "first"),
    "accelerator-only": Terms("count", "first"),
    "round-robin": Terms("count", "turns"),
}
_HOP_PRIOR_S, _HOP_MOST_S = 0.005, 0.2


def request_families(partitions: int) -> list[Family]:
    """Return the families whose jobs are requests of several jobs."""
    return [Family("request", n) for n in range(partitions)]


class DeliveryLatency:
    """The time from the end of a job to its client: p99 of the notification's delay + p99 of writing the response."""

    def __init__(self) -> None:
        # From the end of a job until its router was notified, and from there to the response.
        self.heard = Lateness(0.99, window=1000, prior=_HOP_PRIOR_S)
        self.replied = Lateness(0.99, window=1000)

    @property
    def p99_s(self) -> float:
        """The seconds that an admission must allow for; bounded, so that one stall does not close lanes for long."""
        return min(self.heard.value + self.replied.value, _HOP_MOST_S)


class LanePolicy:
    """The rules by which jobs are admitted: policy `name` for lanes of embeddings, predicted ends for all others."""

    def __init__(self, name: Admission, hops: DeliveryLatency) -> None:
        self.name: Admission = name
        self.hops = hops

    def classes(self, asked: Sequence[str]) -> Sequence[str]:
        """Return the classes that a job for `asked` may take, in order."""
        if tuple(asked) == EMBED_CLASSES and self.name == "accelerator-only":
            return EMBED_CLASSES[:1]
        return asked

    def terms(self, asked: Sequence[str]) -> Terms:
        """Return the rule by which a lane is chosen among the classes `asked`."""
        name: Admission = self.name if tuple(asked) == EMBED_CLASSES else "windve-tokens"
        return _TERMS[name]._replace(hop_s=self.hops.p99_s)
