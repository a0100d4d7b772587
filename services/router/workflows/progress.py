"""Progress events of a workflow: a stage's number of done jobs, and the job that generates a grounded answer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from common.bus import Bus, Notifications
from common.bus.events import Subscription
from common.wire.results import Event, decode_result
from common.wire.workflows import RequestResult, ResponseOptions

GENERATE_STAGE = "generate"


class StageProgress(msgspec.Struct, frozen=True):
    """The number of a stage's jobs that are done, of `total` jobs; a `total` of 0 means unknown."""

    stage: str
    done: int
    total: int


class GroundedProgress(msgspec.Struct, frozen=True):
    """The job that generates a grounded answer, and the passages that the answer rests on, as the API shows them."""

    job: str
    retrieval: dict[str, Any]
    stage: str = GENERATE_STAGE


Progress = StageProgress | GroundedProgress


def encode_progress(progress: Progress) -> bytes:
    """Return the data of a progress event."""
    return msgspec.json.encode(progress)


def grounded_progress(event: Event) -> GroundedProgress | None:
    """Return the progress that an event of a grounded request, or its result, carries; None for any other event."""
    if event.kind == "progress" and event.data[:1] == b"{":
        fields = msgspec.json.decode(event.data, type=dict[str, Any])
        if fields.get("stage") == GENERATE_STAGE and "job" in fields:
            return GroundedProgress(fields["job"], fields["retrieval"])
    if event.kind == "result":
        result = decode_result(event.data)
        if isinstance(result, RequestResult) and result.jobs and "retrieval" in result.info:
            return GroundedProgress(result.jobs[0], result.info["retrieval"])
    return None


def latest_grounded_progress(events: Sequence[Event]) -> GroundedProgress | None:
    """Return the latest grounded progress among a request's events, None before the generate job was admitted."""
    found = (grounded_progress(event) for event in reversed(events))
    return next((progress for progress in found if progress is not None), None)


async def await_grounded_progress(
    notifications: Notifications,
    request: str,
    deadline_ms: int,
    subscription: Subscription | None = None,
) -> GroundedProgress | Event:
    """Wait for the progress of a grounded request; return the request's outcome if the request ends first."""
    events = notifications.events(request, 0, deadline_ms, subscription)
    async with contextlib.aclosing(events):
        async for event in events:
            if (progress := grounded_progress(event)) is not None:
                return progress
            if event.ends:
                return event
    return Event(
        index=-1,
        kind="expired",
        code="deadline_exceeded",
        message="the deadline passed before the answer began",
    )


async def grounded_options(bus: Bus, request: str) -> ResponseOptions | None:
    """Return the response options of a grounded request that is over; None for any other request."""
    for event in (await bus.jobs.log(request))[-1:]:
        if event.kind == "result" and grounded_progress(event) is not None:
            result = decode_result(event.data)
            assert isinstance(result, RequestResult)
            return msgspec.convert(result.info["view"], ResponseOptions)
    return None
