from __future__ import annotations

from pathlib import Path

import pytest

from common.bus import Bus, keys
from common.bus.writes import START, WRITTEN_AT_ONCE
from common.clock import SystemClock
from common.config import Common
from common.errors import ConfigError
from common.registry.collections import Collections
from common.wire.registry import CollectionRecord
from common.wire.search import Write
from tests.support.servers import Server


def _empty() -> Write:
    return Write(request="r", index=0, router="r1")


async def test_written_names_the_shards(bus: Bus) -> None:
    """Each write names its shard once more; what names none is passed over; nothing new is nothing."""
    family = bus.writes.search_family("c")
    after = await bus.writes.last_written(family)
    assert after == START
    await bus.writes.append("c", 0, _empty())
    await bus.writes.append("c", 1, _empty())
    await bus.connection.call("XADD", keys.written(family), "*", "s", "no number/")
    news = await bus.writes.await_written(family, after, 10)
    assert (news.shards, news.gap) == ({("c", 0), ("c", 1)}, False)
    assert news.after == await bus.writes.last_written(family)
    again = await bus.writes.await_written(family, news.after, 10)
    assert (again.shards, again.after, again.gap) == (set(), news.after, False)


async def test_written_tells_a_gap(bus: Bus) -> None:
    """A reader so far behind that names were trimmed is told so, and one that misses none is not."""
    family = bus.writes.search_family("c")
    name = keys.written(family)
    for number in range(WRITTEN_AT_ONCE + 200):
        await bus.connection.call("XADD", name, f"{number + 1}-0", "s", f"c/{number}")
    news = await bus.writes.await_written(family, "1-0", 10)
    assert (len(news.shards), news.gap) == (WRITTEN_AT_ONCE, False)
    await bus.connection.call("XTRIM", name, "MAXLEN", WRITTEN_AT_ONCE)
    assert (await bus.writes.await_written(family, "1-0", 10)).gap
    rest = await bus.writes.await_written(family, news.after, 10)
    assert (len(rest.shards), rest.gap) == (199, False)


async def test_partitions_are_agreed_on(shared_redis: Server, tmp_path: Path) -> None:
    """A process told another number is refused while there are collections, and may set it before there are."""

    async def opened(number: int) -> Bus:
        config = Common(
            data_dir=str(tmp_path), redis_url=shared_redis.url, search_partitions=number
        )
        return await Bus.open(config, SystemClock())

    one, two = await opened(1), await opened(2)
    await one.writes.agree_on_partitions()
    await two.writes.agree_on_partitions()
    record = CollectionRecord(id="a", tenant="t", name="n", dimension=3, metric="cosine")
    assert await Collections(two).create(record)
    await two.writes.agree_on_partitions()
    with pytest.raises(ConfigError) as caught:
        await one.writes.agree_on_partitions()
    assert "SPILLWAY_SEARCH_PARTITIONS" in str(caught.value)
    await one.close()
    await two.close()
