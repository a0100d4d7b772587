"""A generator that says what a test tells it to, over the real bus: its leases, events and results are real ones.

For what no real model does on purpose: exact pieces, gaps, folds, silence, errors, and deaths at a chosen piece.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.bus import Bus
from common.clock import SystemClock
from common.config import StoreConfig
from common.errors import SpillwayError
from common.ids import Family
from common.registry.models import Models
from common.types.generation import SamplingParams
from common.types.model_card import ModelCard
from common.wire.control import Applied, Extend
from common.wire.jobs import GenerateWork, decode_work
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.wire.results import Delta, Event, GenerateResult, Piece
from common.wire.retrievals import retrieval_of
from common.wire.sessions import Turn
from common.worker.incarnation import incarnation_name
from common.worker.leases import Lease
from common.worker.worker import Worker

NAME = "scripted"
FAMILY = Family(f"chat.{NAME}")
FINGERPRINT = "5c" * 16
CONTEXT = 2000
SPECIALS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(specials: Sequence[str] = SPECIALS) -> Tokenizer:
    """Return a real byte-level BPE tokenizer whose tokens are single bytes, with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return made


_TOKENIZER = byte_tokenizer()
_TOKENIZER.encode_special_tokens = True


def written(text: str) -> list[int]:
    """Return the token ids of a text, none of them special."""
    ids: list[int] = _TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def card(name: str = NAME, **changes: object) -> ModelCard:
    tokenizer = byte_tokenizer()
    values: dict[str, object] = {
        "name": name,
        "kind": "generate",
        "family": f"chat.{name}",
        "fingerprint": FINGERPRINT,
        "dimension": 0,
        "max_tokens": CONTEXT,
        "chat_template": TEMPLATE,
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
        "stop_ids": [tokenizer.token_to_id("<|im_end|>")],
        "sampling": SamplingParams(temperature=0.7, top_p=0.9),
    }
    return ModelCard(**(values | changes))  # type: ignore[arg-type]


class Scene:
    """One job as a script sees it: what was asked, and ways to say something."""

    def __init__(self, consumer: Worker, lease: Lease, work: GenerateWork, logged: int) -> None:
        self.consumer, self.lease, self.work = consumer, lease, work
        self.index = logged
        self.pieces: list[Piece] = []
        self.applied: list[Applied] = []
        self.stopped = False

    def asked(self, index: int = 0) -> str:
        """Return a prompt's text."""
        text: str = byte_tokenizer().decode(self.work.prompts[index], skip_special_tokens=False)
        return text

    async def say(self, *pieces: Piece, fold: bool = False) -> None:
        """Emit pieces in one event at the next index (their `at` is set); `fold` replaces the log by all so far."""
        if self.stopped:
            return
        import msgspec

        fresh = [msgspec.structs.replace(piece, at=self.index) for piece in pieces]
        self.pieces += fresh
        await self._log(Delta(pieces=self.pieces if fold else fresh), fold=fold)

    async def _log(self, delta: Delta | None, *, fold: bool = False) -> None:
        """Log what there is, or nothing, and learn whether the job was stopped."""
        events = {}
        if delta is not None:
            event = Event(index=self.index, kind="progress", data=encode(delta))
            events[self.lease.job] = event
        self.consumer.incarnation.heartbeat.working(60)
        self.stopped = self.lease.job in await self.consumer.outbox.emit(
            [self.lease], events, fold=fold
        )
        self.index += len(events)

    async def text(self, text: str, choice: int = 0, *, finish: str | None = None) -> None:
        """Emit one piece, a token a byte."""
        tokens = written(text)
        await self.say(Piece(at=0, choice=choice, tokens=tokens, text=text, finish=finish))  # type: ignore[arg-type]

    async def extended(self, number: int, *, at: int) -> Extend:
        """Wait for the extension `number` of the prompt, and log that it takes effect after `at` tokens.

        A job that is stopped meanwhile gets one without a change, as nothing is logged any more.
        """
        while not self.stopped:
            state = await self.consumer.bus.control.state(self.lease.job)
            for extension in state.extensions:
                if extension.number == number:
                    self.applied.append(Applied(at, extension, at=self.index))
                    await self._log(Delta(pieces=[], applied=self.applied[-1:]))
                    return extension
            await self._log(None)
            await asyncio.sleep(0.01)
        return Extend(number)

    async def end(self) -> None:
        """Finish with the counts of what was said; a turn with the answer and its tokens."""
        if self.stopped:
            return
        work, part = self.work, None
        output = [token for piece in self.pieces for token in piece.tokens]
        result = GenerateResult(
            prompt_tokens=sum(map(len, work.prompts)), completion_tokens=len(output)
        )
        if work.turn is not None:
            import msgspec

            result = msgspec.structs.replace(result, version=work.turn.version + 1)
            turn = Turn(
                job=self.lease.job,
                history=work.turn.history,
                messages=work.turn.messages,
                answer="".join(piece.text for piece in self.pieces),
                prompt=work.prompts[0][work.turn.history :],
                output=output,
                finish="stop",
                at_ms=0,
                shown=work.turn.shown,
                retrieval=retrieval_of(work.turn.retrieval, self.applied),
                asked=work.turn.asked,
            )
            part = (turn, work.turn)
        await self.consumer.outbox.finish(self.lease, result, index=self.index, part=part)


Script = Callable[[Scene], Awaitable[None]]


async def echo(scene: Scene) -> None:
    """Say back the last user message, word by word."""
    last = scene.asked().rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>")[0]
    words = last.split(" ")
    for choice in range(scene.work.n * len(scene.work.prompts)):
        for index, word in enumerate(words):
            finish = "stop" if index == len(words) - 1 else None
            await scene.text(word + ("" if finish else " "), choice, finish=finish)
    await scene.end()


class Generator:
    """A worker in the test's own process; `script` plays each job it is given, also one that another left."""

    def __init__(self, consumer: Worker) -> None:
        self.consumer = consumer
        self.script: Script = echo
        self.works: list[GenerateWork] = []
        self._scenes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        while True:
            for lease in await self.consumer.reader.read(32, 1 << 30):
                task = asyncio.create_task(self._play(lease))
                self._scenes.add(task)
                task.add_done_callback(self._scenes.discard)

    async def _play(self, lease: Lease) -> None:
        work = decode_work(lease.payload)
        assert isinstance(work, GenerateWork)
        self.works.append(work)
        logged = len(await self.consumer.bus.jobs.log(lease.job)) if lease.attempts > 1 else 0
        scene = Scene(self.consumer, lease, work, logged)
        try:
            await self.script(scene)
        except SpillwayError as error:
            await self.consumer.outbox.refuse(lease, error, index=scene.index)


@contextlib.asynccontextmanager
async def generator(url: str, directory: Path, **changes: object) -> AsyncIterator[Generator]:
    """Serve the scripted model on a bus until the block ends."""
    bus = await Bus.open(StoreConfig(redis_url=url, data_dir=str(directory)), SystemClock())
    record = WorkerRecord(
        worker=incarnation_name("gpu_worker"),
        classes=["gpu"],
        device="sim",
        depth_items=64,
        depth_tokens=100_000,
        service="gpu_worker",
    )
    made = card(**changes)  # type: ignore[arg-type]
    consumer = Worker(bus, Family(made.family), record, largest_items=1, largest_tokens=1)
    await Models(bus).publish(made, byte_tokenizer().to_str().encode())
    await consumer.start()
    found = Generator(consumer)
    running = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await consumer.drain()
        await consumer.stop()
        await bus.close()


async def known(http: aiohttp.ClientSession, name: str, *, status: int = 200) -> None:
    """Wait until the router knows a model, or, with `status` 404, knows it no more."""
    async with asyncio.timeout(60):
        while True:
            async with http.get(f"/v1/models/{name}") as response:
                if response.status == status:
                    return
            await asyncio.sleep(0.1)
