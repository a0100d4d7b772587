"""Arrivals: the promised rate, rising times, traces read or refused with a reason."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import arrivals


@given(st.sampled_from(["steady", "poisson", "bursty"]), st.integers(0, 2**32), st.floats(0.5, 500))
def test_times_rise(kind: str, seed: int, rate: float) -> None:
    """Whatever the process, arrivals never go back in time."""
    times = list(itertools.islice(arrivals.named(kind, rate, seed), 200))

    assert sorted(times) == times


@pytest.mark.parametrize("kind", ["steady", "poisson", "bursty"])
def test_rate_is_kept(kind: str) -> None:
    """Over a long time every process brings the rate asked for, within 5 %."""
    times = itertools.takewhile(lambda t: t < 4000, arrivals.named(kind, 20.0, 7))

    assert abs(sum(1 for _ in times) / 4000 - 20.0) < 1.0


def test_bursts_are_bursts() -> None:
    """A bursty process has more variance per second than a Poisson process of the same rate."""

    def dispersion(kind: str) -> float:
        counts = [0] * 2000
        for at in itertools.takewhile(lambda t: t < 2000, arrivals.named(kind, 10.0, 3)):
            counts[int(at)] += 1
        mean = sum(counts) / len(counts)
        return sum((c - mean) ** 2 for c in counts) / len(counts) / mean

    assert dispersion("bursty") > 2 * dispersion("poisson")


def test_trace_offsets(tmp_path: Path) -> None:
    """A trace counts from its first line, in ms or s, and can be replayed faster."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 5000}\n\n{"timestamp": 6000}\n{"timestamp": 9000}\n')

    assert arrivals.trace(path, speed=2.0) == [0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"timestamp": 2}\n{"timestamp": 1}\n', "line 2: the timestamp goes back"),
        ('{"at": 2}\n', "line 1: expected an object with a numeric 'timestamp'"),
        ("nonsense\n", "line 1: expected"),
        ('{"timestamp": [1]}\n', "line 1: expected"),
    ],
)
def test_bad_trace_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """A trace that cannot be used names its file, line and what is expected."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    with pytest.raises(arrivals.TraceError, match=reason):
        arrivals.trace(path)


def test_trace_needs_a_file() -> None:
    """Asking for a trace without one says which option is missing."""
    with pytest.raises(arrivals.TraceError, match="--trace"):
        arrivals.named("trace", 1.0, 1)


def test_same_seed_same_times() -> None:
    """A run can be repeated: the seed decides every arrival."""
    first = list(itertools.islice(arrivals.bursty(5, random.Random(1)), 50))

    assert first == list(itertools.islice(arrivals.bursty(5, random.Random(1)), 50))
