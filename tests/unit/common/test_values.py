"""The reader of large values: replies are the same however the socket cuts them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from common.redis.values import Reply, ReplyReader, packed

TEXTS = st.binary(max_size=40).filter(lambda text: b"\r" not in text and b"\n" not in text)
REPLIES = st.lists(
    st.one_of(
        st.none(),
        st.integers(-(10**9), 10**9),
        TEXTS,
        st.builds(
            lambda size, byte: bytearray([byte]) * size, st.integers(0, 30_000), st.integers(0, 255)
        ),
        st.builds(lambda text: ResponseError(f"ERR {text}"), st.text("abc ", max_size=20)),
    ),
    min_size=1,
    max_size=8,
)


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True


def _encoded(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, ResponseError):
        return b"-%b\r\n" % str(reply).encode()
    if isinstance(reply, bytearray):
        return b"$%d\r\n%b\r\n" % (len(reply), bytes(reply))
    return b"+%b\r\n" % reply


def _feed(reader: ReplyReader, data: bytes, most: int) -> None:
    """Give a reader bytes as a loop does, at most so many at once."""
    while data:
        place = reader.get_buffer(-1)
        size = min(len(place), len(data), most)
        place[:size] = data[:size]
        reader.buffer_updated(size)
        data = data[size:]


@given(replies=REPLIES, most=st.sampled_from([1, 2, 3, 7, 100, 5_000, 1 << 20]))
def test_replies_however_they_are_cut(replies: list[Reply], most: int) -> None:
    """Statuses, numbers, values, nothing and errors come back in order, and the reader can be asked again."""

    async def twice() -> list[list[Reply]]:
        reader, transport, found = ReplyReader(), _Transport(), []
        reader.connection_made(transport)
        for _ in range(2):
            asked = asyncio.create_task(reader.ask([("GET", "x")] * len(replies)))
            await asyncio.sleep(0)
            _feed(reader, b"".join(map(_encoded, replies)), most)
            found.append(await asked)
        assert transport.written == 2 * len(replies) * packed(("GET", "x"))
        return found

    def shown(some: list[Reply]) -> list[object]:
        return [str(each) if isinstance(each, ResponseError) else each for each in some]

    for found in asyncio.run(twice()):
        assert shown(found) == shown(replies)
        assert [type(each) for each in found] == [type(each) for each in replies]


async def test_a_lost_connection_ends_the_wait() -> None:
    """Whoever waits for replies learns at once that the connection is lost, and nobody can ask on it again."""
    reader = ReplyReader()
    reader.connection_made(_Transport())
    asked = asyncio.create_task(reader.ask([("GET", "x")]))
    await asyncio.sleep(0)
    _feed(reader, b"$10\r\nabc", 100)
    reader.connection_lost(None)
    with pytest.raises(RedisConnectionError):
        await asked
    with pytest.raises(RedisConnectionError):
        await reader.ask([("GET", "x")])


def test_a_command_is_packed_as_the_server_reads_it() -> None:
    """Words are bytes, texts or numbers."""
    assert packed(("SET", b"\xff\r\n", 12)) == b"*3\r\n$3\r\nSET\r\n$3\r\n\xff\r\n\r\n$2\r\n12\r\n"
