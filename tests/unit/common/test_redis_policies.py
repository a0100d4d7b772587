"""The policies on a clock that the test moves: who is refused, who finds out, and how long a server has been away."""

from __future__ import annotations

import pytest

from common.redis.breaker import CircuitBreaker
from common.redis.errors import RedisAway, RedisClosed
from common.redis.persist import SLOW_S, PersistPolicy
from tests.support.clock import ManualClock


def test_a_breaker_lets_one_find_out() -> None:
    """After a failure nobody tries for a while; then one does, and the others wait for as long as that may take."""
    clock = ManualClock()
    breaker = CircuitBreaker(clock, again_s=1.0, probe_s=3.0)
    assert not breaker.failed
    breaker.probe()
    assert not breaker.refuses  # nothing has failed, so any number may try
    breaker.open("why")
    assert (breaker.failed, breaker.refuses, breaker.why) == (True, True, "why")
    clock.now_s = 1.0
    assert not breaker.refuses
    breaker.probe()
    assert breaker.refuses
    clock.now_s = 4.0  # who found out never came back
    assert not breaker.refuses
    breaker.probe()
    breaker.close()
    assert (breaker.failed, breaker.refuses) == (False, False)


def test_for_how_long_redis_is_reached() -> None:
    """A break, a slow reply and a suspicion begin the count anew."""
    clock = ManualClock()
    policy = PersistPolicy(clock, down=RuntimeError)
    clock.now_s = 5.0
    assert (policy.down_s(), policy.reached_for()) == (5.0, 0.0)
    policy.reached(0.1)
    clock.now_s = 9.0
    policy.reached(SLOW_S)
    assert (policy.down_s(), policy.reached_for()) == (0.0, 4.0)
    policy.reached(SLOW_S + 0.1)
    assert policy.reached_for() == 0.0
    clock.now_s = 12.0
    policy.suspect()
    assert policy.reached_for() == 0.0
    policy.missed("why")
    clock.now_s = 14.0
    policy.missed("why")
    policy.suspect()
    assert (policy.down_s(), policy.reached_for()) == (2.0, 0.0)


async def test_it_is_tried_until_the_time_is_over() -> None:
    """A caller with time gets the reply of a later try; one without is told why; of a closed client at once."""
    clock = ManualClock()
    policy = PersistPolicy(clock, down=RuntimeError)
    errors: list[Exception] = [RedisAway("one"), RedisAway("two")]

    async def attempt() -> str:
        if errors:
            raise errors.pop()
        return "reply"

    assert await policy.run(attempt, 1.0) == "reply"
    errors[:] = [RedisAway("now")]
    with pytest.raises(RuntimeError, match="now"):
        await policy.run(attempt, 0.0)
    errors[:] = [RedisAway("unasked"), RedisClosed("closed")]
    with pytest.raises(RuntimeError, match="closed"):
        await policy.run(attempt, 1.0)
    assert len(errors) == 1
