"""Every error code over HTTP: what a worker ends a job with is what the client is answered, in JSON and in a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from common.bus import Bus
from common.errors import CODES, DeadlineExceeded, InternalError, SpillwayError, rebuild
from common.registry.dead_letters import DeadLetters
from tests.support.chat import CHAT, asks, frames_of, post
from tests.support.scripted_generator import FAMILY, Generator, Scene

# Ended by the deadline only, which is tried below.
ANSWERED = sorted(set(CODES) - {DeadlineExceeded.default_code})
CHARGED = sorted(code for code, cls in CODES.items() if issubclass(cls, InternalError))
NEWER = {"gone_tomorrow": 410, "conflict_tomorrow": 409, "later_tomorrow": 503}
AT_ONCE = 16
WAIT_S = 7.0


def made(code: str) -> SpillwayError:
    """Return an error with every field set; a code that is not defined is a newer worker's."""
    if code in CODES:
        return CODES[code](f"it is {code}", code=code, param="field", retry_after_s=WAIT_S)
    status = NEWER[code]
    return rebuild(code, f"it is {code}", status=status, param="field", retry_after_s=WAIT_S)


def code_asked(scene: Scene) -> str:
    """Return the code that a client asks the worker to end its job with."""
    return scene.asked().rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>")[0]


async def fails(scene: Scene) -> None:
    """End with the error that is asked for; a stream has begun by then."""
    await scene.text("begun ")
    raise made(code_asked(scene))


def body_of(code: str) -> dict[str, Any]:
    """Return the error object that a client must get."""
    error = made(code)
    # A sentence about the bus may name the address of Redis, which is not the client's to know.
    message = "the bus is away; try again" if code == "bus_down" else f"it is {code}"
    return {"message": message, "type": error.type, "param": "field", "code": code}


async def each(codes: list[str], one: Any) -> dict[str, Any]:
    """Return what `one` finds of every code, some at a time."""
    few = asyncio.Semaphore(AT_ONCE)

    async def found(code: str) -> Any:
        async with few:
            return await one(code)

    return dict(zip(codes, await asyncio.gather(*map(found, codes)), strict=True))


async def test_every_code_is_answered_as_it_is_defined(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """Status, type, code, sentence, field, Retry-After and whether to come back; also of codes of newer workers."""
    model.script = fails

    async def answer(code: str) -> tuple[Any, ...]:
        status, body, headers = await post(http, asks(code))
        return (
            status,
            body["error"],
            headers.get("Retry-After"),
            headers["x-should-retry"],
        )

    def expected(code: str) -> tuple[Any, ...]:
        error = made(code)
        wait = "7" if error.http_status in {429, 503} else None
        again = "true" if error.retryable else "false"
        return error.http_status, body_of(code), wait, again

    codes = [*ANSWERED, *NEWER]
    assert await each(codes, answer) == {code: expected(code) for code in codes}


async def test_every_code_ends_a_stream_with_its_status(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """What was said stands; the last frame is the error, with the status that HTTP cannot say any more."""
    model.script = fails

    async def last(code: str) -> tuple[Any, ...]:
        async with http.post(CHAT, json=asks(code, stream=True)) as response:
            frames = [data for _, data in frames_of(await response.read())]
            name = response.headers["x-request-id"]
            said = [c["delta"].get("content") for f in frames[:-1] for c in f["choices"]]
        async with http.get(f"/v1/requests/{name}") as response:
            kept = await response.json()
        return "begun " in said, frames[-1], kept["error"]

    def expected(code: str) -> tuple[Any, ...]:
        body = body_of(code)
        return True, {"error": body | {"status": made(code).http_status}}, body

    codes = [*ANSWERED, *NEWER]
    assert await each(codes, last) == {code: expected(code) for code in codes}


async def test_a_deadline_that_passes_in_a_worker(
    http: aiohttp.ClientSession, model: Generator, bus: Bus
) -> None:
    """Whether the worker says so first, or the router, the answer is 504."""

    async def late(scene: Scene) -> None:
        while bus.clock.now_ms() <= scene.lease.deadline_ms:  # noqa: ASYNC110 - a clock has no event
            await asyncio.sleep(0.05)
        raise DeadlineExceeded("the deadline passed before the generation ended")

    model.script = late
    status, body, _ = await post(http, asks(), **{"Spillway-Timeout": "2"})
    told = body["error"]
    assert (status, told["code"], told["type"]) == (504, "deadline_exceeded", "timeout_error")


@pytest.mark.timeout(120)
async def test_every_charge_ends_as_a_dead_letter_with_its_code(
    http: aiohttp.ClientSession, model: Generator, bus: Bus
) -> None:
    """A job that is convicted of failing is 500 `job_failed` to its client; the letter says of what."""

    async def charged(scene: Scene) -> None:
        code = code_asked(scene)
        await scene.consumer.outbox.fail(scene.lease, code, f"it is {code}", "a trace")

    model.script = charged
    known = {letter.job for letter in await DeadLetters(bus).all(FAMILY)}

    async def answer(code: str) -> tuple[Any, ...]:
        status, body, _ = await post(http, asks(code))
        return status, body["error"]["code"], body["error"]["message"]

    answers = await each(CHARGED, answer)
    assert answers == {code: (500, "job_failed", f"it is {code}") for code in CHARGED}
    letters = [x for x in await DeadLetters(bus).all(FAMILY) if x.job not in known]
    assert sorted(letter.code for letter in letters) == CHARGED
    for letter in letters:
        event = (await bus.jobs.log(letter.job))[-1]
        assert event.error is not None
        assert (event.kind, event.code, event.error.status) == ("dead", letter.code, 500)
