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
}  # classes by kind of family
LOW_SHARE = 0.5  # the part of a lane's depth for requests of low priority
_TERMS: dict[Admission, Terms] = {
    "windve-tokens": Terms("finish", "first"),
    "windve": Terms("count", "first"),
    "accelerator-only": Terms("count", "first"),
    "round-robin": Terms("count", "turns"),
}
_HOP_PRIOR_S, _HOP_MOST_S = 0.005, 0.2


def request_families(partitions: int) -> list[Family]:
    """Return the families of workflows: each of their jobs is a request of several jobs."""
    return [Family("request", n) for n in range(partitions)]


class DeliveryLatency:
    """The seconds from a job's end to its client: p99 of the notification's delay plus p99 of writing the response."""

    def __init__(self) -> None:
        # `heard`: from the end of a job to its router's notification; `replied`: from there to the response.
        self.heard = Lateness(0.99, window=1000, prior=_HOP_PRIOR_S)
        self.replied = Lateness(0.99, window=1000)

    @property
    def p99_s(self) -> float:
        """The seconds of delivery that admission allows for; bounded, so that a stall closes lanes only briefly."""
        return min(self.heard.value + self.replied.value, _HOP_MOST_S)


class LanePolicy:
    """The rules of admission: the policy `name` for lanes of embeddings, predicted ends for all other lanes."""

    def __init__(self, name: Admission, hops: DeliveryLatency) -> None:
        self.name: Admission = name
        self.hops = hops

    def classes(self, asked: Sequence[str]) -> Sequence[str]:
        """Return, in order, the classes among `asked` that a job may take."""
        if tuple(asked) == EMBED_CLASSES and self.name == "accelerator-only":
            return EMBED_CLASSES[:1]
        return asked

    def terms(self, asked: Sequence[str]) -> Terms:
        """Return the rule that chooses a lane among the classes `asked`."""
        name: Admission = self.name if tuple(asked) == EMBED_CLASSES else "windve-tokens"
        return _TERMS[name]._replace(hop_s=self.hops.p99_s)
