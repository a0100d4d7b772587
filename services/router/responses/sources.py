"""Where an answer comes from: a request that is its own generate job, or the last job of a grounded one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from common.bus.events import Subscription
from common.errors import NotFound
from common.wire.results import Event
from services.router.http.context import Router
from services.router.responses.chunks import Extension
from services.router.responses.outcomes import error_of
from services.router.text.grounding import Passage, cited
from services.router.workflows.progress import GroundedProgress, await_grounded_progress

_SEVERAL = "request~"


class AnswerSource(NamedTuple):
    """Where an answer comes from: its generate job, that job's bell if it was there first, and what goes with it."""

    job: str
    bell: Subscription | None = None
    extension: Extension | None = None


def source_of(router: Router, request: str) -> Callable[[], Awaitable[AnswerSource]]:
    """Return where the answer to a request that was accepted before comes from."""
    return grounded(router, request) if request.startswith(_SEVERAL) else kept(request)


def kept(request: str, bell: Subscription | None = None) -> Callable[[], Awaitable[AnswerSource]]:
    """Return the source of a request that is its own generate job."""

    async def source() -> AnswerSource:
        return AnswerSource(request, bell)

    return source


def grounded(router: Router, request: str) -> Callable[[], Awaitable[AnswerSource]]:
    """Return the source of a grounded request whose client came back; it waits until the request tells its job."""

    async def source() -> AnswerSource:
        state = await router.bus.jobs.get(request)
        if state is None:
            raise NotFound("the request's result has expired", code="request_not_found")
        told = await await_grounded_progress(
            router.notifications, request, state.deadline_ms + 1000
        )
        if isinstance(told, Event):
            raise error_of(told)
        return await told_source(router, told)

    return source


async def told_source(router: Router, told: GroundedProgress) -> AnswerSource:
    """Return the source of a grounded answer whose job is known; that job's bell rings here from now on."""
    await router.bus.jobs.adopt(told.job, router.admission.router)
    return AnswerSource(told.job, None, extension_of(told))


def extension_of(told: GroundedProgress) -> Extension:
    """Return what a grounded answer adds to a chat's: its passages, and the citations of a whole answer."""
    passages = msgspec.convert(told.retrieval["passages"], list[Passage])
    return Extension(
        retrieval=told.retrieval,
        citations=lambda answer: [msgspec.to_builtins(one) for one in cited(answer, passages)],
    )
