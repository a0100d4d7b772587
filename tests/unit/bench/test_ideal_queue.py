"""The ideal device's queue, by which R1 tells the load's waiting from the product's."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.ideal_queue import waits

# In sixteenths of a second, so that sums are exact.
GAPS = st.lists(st.integers(0, 64).map(lambda gap: gap / 16), max_size=60)
SERVICE_S = 0.5


@given(gaps=GAPS)
def test_batches_follow_each_other(gaps: list[float]) -> None:
    """Nobody waits longer than a batch takes; batches begin in order, at least one batch's time apart."""
    arrivals = list(accumulate(gaps))
    waited = waits(arrivals, SERVICE_S)
    assert all(0.0 <= each <= SERVICE_S for each in waited)
    begins = [at + wait for at, wait in zip(arrivals, waited, strict=True)]
    for before, after in pairwise(begins):
        assert after == before or after - before >= SERVICE_S


@given(gaps=GAPS, delay=st.integers(0, 64).map(lambda gap: gap / 16))
def test_a_constant_delay_changes_no_wait(gaps: list[float], delay: float) -> None:
    """A product that brings every request to the device equally late adds just that: so waits can be subtracted."""
    arrivals = list(accumulate(gaps))
    assert waits([at + delay for at in arrivals], SERVICE_S) == waits(arrivals, SERVICE_S)


@given(gaps=GAPS)
def test_the_device_idles_only_while_nobody_waits(gaps: list[float]) -> None:
    """Who finds the device free begins at once."""
    arrivals = list(accumulate(gaps))
    waited = waits(arrivals, SERVICE_S)
    for number, (at, wait) in enumerate(zip(arrivals, waited, strict=True)):
        begun = [a + w for a, w in zip(arrivals[:number], waited[:number], strict=True)]
        busy = any(begin <= at < begin + SERVICE_S for begin in begun)
        assert busy or wait == 0.0 or any(begin > at for begin in begun)


def test_even_arrivals_wait_for_nobody() -> None:
    """R1's even load of 100 requests a second never waits for a device of 5 ms."""
    assert set(waits([number / 100 for number in range(500)], 0.005)) == {0.0}
