"""How an overload is judged: each promise by itself, lateness from when a request was due."""

from __future__ import annotations

from loadgen.load import Sample
from tests.guards import overload


def sample(done_s: float, status: int = 200, *, sent_s: float = 0.0) -> Sample:
    """Return a request of 100 tokens that was due at 0."""
    return Sample(0.0, sent_s, done_s, status, "", 100)


def test_what_is_kept() -> None:
    """All in time, as much as the capacity, refusals at once: nothing is missed."""
    found = overload.summed_up([sample(0.5)] * 10 + [sample(0.01, 429)] * 10, 1.0, 1000.0)

    assert found == overload.Overload(1.0, 0.0, 0.01, 0)
    assert found.missed() == []


def test_what_is_missed() -> None:
    """Late answers, slow refusals, too little done and errors are each named; a late sender excuses nothing."""
    late = [sample(1.2, sent_s=0.5)] * 5 + [sample(0.5)] * 5
    found = overload.summed_up([*late, sample(0.6, 429), sample(0.1, 500)], 1.0, 1000.0)

    assert (found.goodput, found.late, found.refused_s, found.errors) == (0.5, 0.5, 0.6, 1)
    assert len(found.missed()) == 4
