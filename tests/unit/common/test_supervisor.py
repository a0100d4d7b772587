"""A task of the whole process that ends by itself ends the process; one of a single thing is begun again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from common.tasks import (
    FIRST_PAUSE_S,
    HEALTHY_S,
    LONGEST_PAUSE_S,
    RESTARTS,
    Supervisor,
    TaskEnded,
)
from tests.support.clock import ManualClock


async def _raises() -> None:
    raise RuntimeError("boom")


async def _returns() -> None:
    return


async def _cancelled() -> None:
    raise asyncio.CancelledError


async def _lasts() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("work", "how"),
    [(_raises, "failed"), (_returns, "returned"), (_cancelled, "was cancelled")],
)
async def test_end_of_a_process_task_ends_the_process(
    work: Callable[[], Coroutine[Any, Any, None]], how: str
) -> None:
    """However a task of the process ends: the process is stopped, its other tasks end, and the context raises."""
    others: list[asyncio.Task[None]] = []

    async def serve(stopping: asyncio.Event) -> None:
        async with Supervisor(stopping) as tasks:
            others.append(tasks.process(_lasts(), "other"))
            tasks.process(work(), "mine")
            await stopping.wait()

    with pytest.raises(TaskEnded, match=f"'mine' {how} before the stop") as caught:
        await serve(asyncio.Event())

    assert [other.cancelled() for other in others] == [True]
    assert isinstance(caught.value.__cause__, RuntimeError) == (how == "failed")


async def test_tasks_may_return_after_the_stop() -> None:
    """After the stop tasks may return, or be cancelled; the context then raises nothing."""
    stopping = asyncio.Event()
    async with Supervisor(stopping) as tasks:
        first = tasks.process(stopping.wait(), "first")
        second = tasks.process(_lasts(), "second")
        stopping.set()
        await first
        second.cancel()
        await asyncio.wait({second})


async def test_an_error_after_the_stop_is_none_the_less_told() -> None:
    """A task that fails as it is drained still ends the process with an error."""
    stopping = asyncio.Event()
    stopping.set()
    with pytest.raises(TaskEnded):
        async with Supervisor(stopping) as tasks:
            await asyncio.wait({tasks.process(_raises(), "late")})


async def test_an_owner_may_end_its_tasks() -> None:
    """A task that its owner ends before the stop is no failure."""
    stopping = asyncio.Event()
    async with Supervisor(stopping) as tasks:
        mine = tasks.process(_lasts(), "mine")
        await tasks.end(mine)
        assert mine.cancelled()
        assert not stopping.is_set()


async def test_the_bodys_own_error_goes_first() -> None:
    """An error of the service itself is not hidden by that of a task."""

    async def serve(stopping: asyncio.Event) -> None:
        async with Supervisor(stopping) as tasks:
            tasks.process(_raises(), "mine")
            await stopping.wait()
            raise LookupError

    with pytest.raises(LookupError):
        await serve(asyncio.Event())


async def test_a_scoped_task_is_begun_again() -> None:
    """Pauses double up to the longest, and begin anew after a run that lasted; a return is the end; each is counted."""
    clock, stopping, runs = ManualClock(), asyncio.Event(), 0
    pauses: list[float] = []
    before = RESTARTS._value.get()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 10:
            clock.now_s += HEALTHY_S
        if runs <= 11:
            raise RuntimeError("boom")

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async with Supervisor(stopping, clock=clock, pause=pause) as tasks:
        await tasks.scoped(work, "one")

    doubled = [FIRST_PAUSE_S * 2**n for n in range(9)]
    shown = [min(each, LONGEST_PAUSE_S) for each in doubled]
    assert pauses == [*shown, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert runs == 12
    assert RESTARTS._value.get() - before == 11
    assert not stopping.is_set()


async def test_a_scoped_task_can_be_ended() -> None:
    """A scoped task that is cancelled stays so."""
    async with Supervisor(asyncio.Event()) as tasks:
        mine = tasks.scoped(_lasts, "one")
        await asyncio.sleep(0)
        await tasks.end(mine)
        assert mine.cancelled()


async def test_spawned_tasks_are_awaited_then_cancelled() -> None:
    """Leaving waits for a task that nobody awaits, for as long as asked; what fails or lasts ends nothing else."""
    supervisor, began, go_on, done = Supervisor(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        await go_on.wait()
        done.set()

    supervisor.spawn(work(), "work")
    supervisor.spawn(_raises(), "fails")
    await began.wait()
    settling = asyncio.create_task(supervisor.settle(3600.0))
    go_on.set()
    await settling
    assert done.is_set()

    done.clear()
    go_on.clear()
    supervisor.spawn(work(), "lasts")
    await supervisor.settle(0.0)
    go_on.set()
    await supervisor.settle(3600.0)
    assert not done.is_set()
