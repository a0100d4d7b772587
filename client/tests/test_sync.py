"""The blocking client: in scripts, in threads, beside a running loop; and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

import spillway_client as sw
from spillway_client import _portal
from spillway_client._portal import Portal, iterated

from .generator import Generator, Piece, serving

PIECES: list[Piece] = [(0, 0, "one", None), (1, 0, " two", None), (2, 0, " three", "stop")]


class Beside:
    """A generator that runs in a loop of its own, as a server of another process would."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with serving(self.generator):
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> Generator:
        self._thread.start()
        assert self._ready.wait(60)
        return self.generator

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)


@pytest.fixture
def beside() -> Iterator[Generator]:
    """A running generator."""
    with Beside(Generator(PIECES)) as generator:
        yield generator


@pytest.fixture
async def generator() -> AsyncIterator[Generator]:
    """A generator in the test's own loop."""
    async with serving(Generator(PIECES)) as made:
        yield made


def test_a_script(beside: Generator) -> None:
    """Streams are generators, `final` is the whole, and leaving early ends the work at the server."""
    with sw.Spillway(beside.url) as client:
        with client.chat.completions.create("hi", stream=True) as stream:
            assert [chunk.text for chunk in stream] == ["", "one", " two", " three"]
            assert stream.final().text == stream.text == "one two three"
            assert stream.usage is not None
        with client.chat.completions.stream("hi") as stream:
            assert next(stream.texts()) == "one"
        assert beside.cancelled == [stream.request_id]
        rest = client.chat.completions.resume(stream.request_id or "", last_event_id="0.0")
        assert "".join(rest.texts()) == " two three"
        assert client.session("s").id == "s"


async def test_inside_a_running_loop() -> None:
    """In the thread of a running loop a call blocks that loop, and nothing else: no deadlock."""
    with Beside(Generator(PIECES)) as generator, sw.Spillway(generator.url) as client:
        assert client.chat.completions.stream("hi").final().text == "one two three"


def test_many_threads(beside: Generator) -> None:
    """One client serves many threads at once."""
    texts: list[str] = []
    with sw.Spillway(beside.url) as client:
        threads = [
            threading.Thread(
                target=lambda: texts.append(client.chat.completions.stream("hi").final().text)
            )
            for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    assert texts == ["one two three"] * 16


def test_close_ends_thread_and_calls(beside: Generator) -> None:
    """Closing ends the thread and what others wait for; afterwards every call is refused."""
    beside.endless = True
    client = sw.Spillway(beside.url)
    stream = client.chat.completions.stream("hi")
    caught: list[BaseException] = []

    def read() -> None:
        try:
            stream.final()
        except sw.SpillwayError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while stream.text != "one two three":
        time.sleep(0.01)
    client.close()
    client.close()
    reader.join(10)

    assert isinstance(caught[0], sw.APIConnectionError)
    assert beside.cancelled == [stream.request_id]
    assert not [t for t in threading.enumerate() if t.name == "spillway-client"]
    with pytest.raises(RuntimeError, match="closed"):
        client.models.list()


def test_a_chained_call(beside: Generator) -> None:
    """A call, a session and a stream keep the client they were made from; the client ends with the last of them."""
    assert sw.Spillway(beside.url).chat.completions.stream("hi").final().text == "one two three"
    session = sw.Spillway(beside.url).session("s")
    assert session.stream("hi").final().text == "one two three"
    texts = sw.Spillway(beside.url).chat.completions.stream("hi").texts()
    assert "".join(texts) == "one two three"
    del session, texts

    assert not [t for t in threading.enumerate() if t.name == "spillway-client"]


def test_errors_cross_the_thread() -> None:
    """Errors are the async client's own."""
    with sw.Spillway("http://127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(sw.APIConnectionError):
            client.models.list()
        with pytest.raises(sw.InvalidInputError):
            client.chat.completions.create([])


SCRIPT = """
import sys
import spillway_client as sw
client = sw.Spillway(sys.argv[1])
for chunk in client.chat.completions.stream("hi"):
    print(chunk.text, flush=True)
"""


def test_a_script_that_forgets_to_close(beside: Generator) -> None:
    """It ends by itself, and says nothing."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", SCRIPT, beside.url],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["one", "two", "three"]
    assert done.stderr == ""


def test_an_interrupt_ends_the_work(beside: Generator) -> None:
    """Ctrl-C in a blocking call is a KeyboardInterrupt there, and cancels the request at the server."""
    beside.endless = True
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, beside.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            if "three" in line:
                child.send_signal(signal.SIGINT)
        said = child.stderr.read()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert beside.cancelled == ["chat.m~0~0"]


def _too_late(*_: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize("wakes", [True, False])
@pytest.mark.parametrize(
    ("handler", "error"),
    [(signal.default_int_handler, KeyboardInterrupt), (_too_late, TimeoutError)],
)
def test_an_interrupted_stream_ends_before_it_is_closed(
    handler: Callable[..., None], error: type[BaseException], wakes: bool
) -> None:
    """A signal while a stream waits for its next piece raises its handler's error, however long the stream takes.

    Ctrl-C is such a signal; a program's own limit of time is another. A signal that comes just before the wait does
    not wake it, as one that the kernel hands to another thread.
    """
    before = signal.signal(signal.SIGINT, handler)
    ended: list[bool] = []

    async def nothing() -> None:
        pass

    portal = Portal(nothing)
    main = threading.main_thread().ident or 0

    async def pieces() -> AsyncIterator[int]:
        try:
            yield 1
            # A TimeoutError is an OSError, which asyncio passes over while it hands this step to the loop's thread.
            waiting = _portal._first.__code__
            while sys._current_frames()[main].f_code is not waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            signal.pthread_kill(main if wakes else threading.get_ident(), signal.SIGINT)
            await asyncio.sleep(30)
            ended.append(False)
        finally:
            await asyncio.sleep(0.2)
            ended.append(True)

    try:
        with pytest.raises(error):
            list(iterated(portal, pieces()))
        assert ended == [True]
    finally:
        signal.signal(signal.SIGINT, before)
        portal.close()
