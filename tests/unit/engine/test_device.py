"""The queue of a device: which task runs next, errors, cancelled callers, and its end."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Container

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import SYSTEM
from engine.device import DeviceQueue, DeviceTask, TaskTimes, next_task, spare
from tests.support.clock import ManualClock

DEADLINES = st.sampled_from([0.0, 1.0, 2.0, math.inf])
TASKS = st.lists(
    st.builds(DeviceTask, kind=st.sampled_from("abc"), deadline_s=DEADLINES, queued_s=st.just(0.0)),
    min_size=1,
    max_size=12,
)


@given(TASKS)
def test_the_earliest_deadline_of_the_oldest(tasks: list[DeviceTask]) -> None:
    """The next task is the oldest of its kind; no other kind's oldest is due earlier, or as early and older."""
    index = next_task(tasks)
    chosen = tasks[index]
    oldest = {kind: [task.kind for task in tasks].index(kind) for kind in {t.kind for t in tasks}}

    assert oldest[chosen.kind] == index
    for other in oldest.values():
        assert (chosen.deadline_s, index) <= (tasks[other].deadline_s, other)


@given(TASKS)
def test_equal_deadlines_run_in_the_order_of_arrival(tasks: list[DeviceTask]) -> None:
    """Where no deadline differs the queue is first in, first out, whatever the kinds."""
    assert next_task([task._replace(deadline_s=1.0) for task in tasks]) == 0


@given(TASKS)
def test_every_task_runs_once_and_a_kind_in_order(tasks: list[DeviceTask]) -> None:
    """Emptied, the queue has run every task; each kind's in the order of their arrival."""
    numbered = list(enumerate(tasks))
    ran: list[tuple[int, DeviceTask]] = []
    while numbered:
        ran.append(numbered.pop(next_task([task for _, task in numbered])))

    assert sorted(number for number, _ in ran) == list(range(len(tasks)))
    for kind in "abc":
        order = [number for number, task in ran if task.kind == kind]
        assert order == sorted(order)


class Device:
    """A queue whose first task blocks until `gate` is set, so that the rest waits behind it."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.waits: list[tuple[str, float]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.queue = DeviceQueue(ended=self.note)

    def note(self, kind: str, times: TaskTimes) -> None:
        self.waits.append((kind, times.waited_s))

    def block(self) -> None:
        self.entered.set()
        self.gate.wait()


@pytest.fixture
async def device() -> AsyncIterator[Device]:
    made = Device()
    yield made
    made.gate.set()
    made.queue.close()


async def submit(
    device: Device, name: str, kind: str, deadline_s: float | None
) -> asyncio.Task[None]:
    """Put a task in the queue that notes its name when it runs."""
    running = asyncio.create_task(
        device.queue.run(device.ran.append, name, kind=kind, deadline_s=deadline_s)
    )
    await asyncio.sleep(0)  # the task has run up to its place in the queue
    return running


async def test_waiting_tasks_run_by_deadline(device: Device) -> None:
    """Tasks that wait behind a running one go by deadline between kinds and by arrival within one."""
    first = asyncio.create_task(device.queue.run(device.block, kind="generate"))
    await asyncio.to_thread(device.entered.wait)
    now_s = SYSTEM.monotonic()
    waiting = [
        await submit(device, "embed late", "embed", now_s + 90),
        await submit(device, "embed early", "embed", now_s + 10),
        await submit(device, "rerank", "rerank", now_s + 60),
        await submit(device, "generate", "generate", None),
    ]
    device.gate.set()
    await asyncio.gather(first, *waiting)

    assert device.ran == ["generate", "rerank", "embed late", "embed early"]
    assert [kind for kind, _ in device.waits] == [
        "generate",
        "generate",
        "rerank",
        "embed",
        "embed",
    ]
    assert all(seconds >= 0 for _, seconds in device.waits)


async def test_a_task_waits_for_other_kinds_only() -> None:
    """The wait that is told begins when the task is queued, or when the last task of its kind has ended."""
    device, clock = Device(), ManualClock()
    device.queue.close()
    queue = DeviceQueue(clock=clock, ended=device.note)
    try:
        first = asyncio.create_task(queue.run(device.block, kind="generate"))
        await asyncio.to_thread(device.entered.wait)
        second = asyncio.create_task(queue.run(int, kind="generate", deadline_s=100.0))
        other = asyncio.create_task(queue.run(int, kind="embed", deadline_s=200.0))
        await asyncio.sleep(0)
        clock.now_s += 8.0
        device.gate.set()
        await asyncio.gather(first, second, other)
    finally:
        queue.close()
    assert device.waits == [("generate", 0.0), ("generate", 0.0), ("embed", 8.0)]


async def test_a_task_has_times() -> None:
    """The device's time from one end to the next is the idle seconds before a task and the seconds of the task."""
    clock, found = ManualClock(), list[tuple[str, TaskTimes]]()
    queue = DeviceQueue(clock=clock, ended=lambda *each: found.append(each))

    def work(seconds: float) -> None:
        clock.now_s += seconds

    try:
        clock.now_s += 2.0
        await queue.run(work, 3.0, kind="generate")
        clock.now_s += 0.5
        await queue.run(work, 0.25, kind="embed")
    finally:
        queue.close()
    assert found == [
        ("generate", TaskTimes(0.0, 3.0, 2.0)),
        ("embed", TaskTimes(0.0, 0.25, 0.5)),
    ]


async def test_a_task_can_be_taken_back(device: Device) -> None:
    """A task that has not begun is revoked and never runs; a task that has begun runs to its end."""
    begun = device.queue.submit(device.block)
    await asyncio.to_thread(device.entered.wait)
    waits = device.queue.submit(device.ran.append, "revoked")
    last = device.queue.submit(device.ran.append, "last")
    assert device.queue.revoke(waits)
    assert not device.queue.revoke(waits)
    assert not device.queue.revoke(begun)
    device.gate.set()
    await asyncio.gather(begun, last)

    assert waits.cancelled()
    assert device.ran == ["last"]


async def test_a_task_taken_back_holds_no_place(device: Device) -> None:
    """Behind a revoked task of its kind, a task that is due first runs first."""
    begun = device.queue.submit(device.block)
    await asyncio.to_thread(device.entered.wait)
    late = device.queue.submit(device.ran.append, "late", kind="embed", deadline_s=30.0)
    other = device.queue.submit(device.ran.append, "other", kind="generate", deadline_s=20.0)
    soon = device.queue.submit(device.ran.append, "soon", kind="embed", deadline_s=10.0)
    assert device.queue.revoke(late)
    device.gate.set()
    await asyncio.gather(begun, other, soon)

    assert device.ran == ["soon", "other"]


async def test_a_task_raises_at_its_caller(device: Device) -> None:
    """A task's error is raised where the task was submitted; the queue goes on."""

    def fail() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await device.queue.run(fail)
    assert await device.queue.run(int, "7") == 7


async def test_a_cancelled_caller_leaves_its_task(device: Device) -> None:
    """A task whose caller was cancelled runs all the same, and the next one after it."""
    first = asyncio.create_task(device.queue.run(device.block))
    await asyncio.to_thread(device.entered.wait)
    cancelled = await submit(device, "cancelled", "", None)
    cancelled.cancel()
    last = await submit(device, "last", "", None)
    device.gate.set()
    await asyncio.gather(first, last)

    assert cancelled.cancelled()
    assert device.ran == ["cancelled", "last"]


async def test_a_closed_queue_ends_its_work() -> None:
    """Tasks put in the queue before its end are run; then its threads end."""
    before = set(threading.enumerate())
    device = Device()
    threads = set(threading.enumerate()) - before
    first = asyncio.create_task(device.queue.run(device.block))
    await asyncio.to_thread(device.entered.wait)
    last = await submit(device, "last", "", None)
    device.queue.close()
    device.gate.set()
    await asyncio.gather(first, last)
    for thread in threads:
        await asyncio.to_thread(thread.join)

    assert device.ran == ["last"]


class Parts:
    """Tasks that leave a core without work when told to, and end when told to; `log` has what happened, in order."""

    def __init__(self, queue: DeviceQueue) -> None:
        self.queue, self.log, self.told = queue, list[str](), list[str]()
        self._orders = set[str]()
        self._changed = threading.Condition()

    def task(self, name: str) -> str:
        self._note(f"{name} begins")
        self._wait(f"spare {name}", self._orders)
        spare()
        spare()  # nothing more to give
        self._note(f"{name} is spare")
        self._wait(f"end {name}", self._orders)
        self._note(f"{name} ends")
        return name

    def _note(self, what: str) -> None:
        with self._changed:
            self.log.append(what)
            self._changed.notify_all()

    def _wait(self, what: str, among: Container[str]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: what in among, 60), what

    def _order(self, *orders: str) -> None:
        with self._changed:
            self._orders.update(orders)
            self._changed.notify_all()

    def submit(self, name: str, kind: str = "a") -> asyncio.Future[str]:
        return self.queue.submit(
            self.task, name, kind=kind, on_spare=lambda: self.told.append(name)
        )

    async def seen(self, what: str) -> None:
        await asyncio.to_thread(self._wait, what, self.log)

    def become_spare(self, name: str) -> None:
        self._order(f"spare {name}")

    def end(self, name: str) -> None:
        self._order(f"spare {name}", f"end {name}")


async def test_a_spare_task_lets_the_next_of_its_kind_begin() -> None:
    """Not before it says so; a task of another kind waits for the end of all; each caller is told once."""
    parts = Parts(DeviceQueue())
    first, second, third = (parts.submit(name) for name in ("first", "second", "third"))
    other = parts.submit("other", "b")
    await parts.seen("first begins")
    assert parts.log == ["first begins"]
    parts.become_spare("first")
    await parts.seen("second begins")
    await parts.seen("first is spare")
    assert parts.told == ["first"]
    parts.end("second")  # the later task may end first
    assert await second == "second"
    await parts.seen("third begins")
    parts.end("third")
    assert await third == "third"
    assert "other begins" not in parts.log
    parts.end("first")
    assert await first == "first"
    parts.end("other")
    assert await other == "other"

    assert parts.told == ["first", "second", "third", "other"]
    assert parts.log.index("first ends") < parts.log.index("other begins")
    parts.queue.close()


def test_spare_elsewhere_does_nothing() -> None:
    """A thread of no device has no turn to pass on."""
    spare()


async def test_a_task_of_another_kind_may_be_revoked_while_it_waits() -> None:
    """The device has chosen the task already, but the task has not begun."""
    parts = Parts(DeviceQueue())
    first = parts.submit("first")
    other = parts.submit("other", "b")
    parts.become_spare("first")
    await parts.seen("first is spare")
    assert parts.queue.revoke(other)
    parts.end("first")
    assert await first == "first"
    last = parts.submit("last", "b")
    parts.end("last")
    assert await last == "last"

    assert "other begins" not in parts.log
    parts.queue.close()
