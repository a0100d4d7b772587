"""What both routes of generation do before an answer: who asks, whether it was asked before, and the door."""

from __future__ import annotations

from aiohttp import web

from common.bus.events import Subscription
from common.config import RouterConfig
from common.errors import Conflict, InvalidRequest, NotFound, Unprocessable
from common.ids import Family
from common.wire.workflows import ResponseOptions
from services.router.admission.job_spec import JobSpec, Prompt, RequestContext
from services.router.admission.policy import GENERATE_CLASSES
from services.router.http.context import REQUEST_ID, ROUTER, Router
from services.router.responses.answers import ReaderAnswer, deliver, last_position, view_of
from services.router.responses.sources import source_of
from services.router.text.generations import GenerationSpec

GENERATION_S = 300.0


def generation_timeout_s(config: RouterConfig) -> float:
    """Return the seconds a generation is given where its client does not say: answers take longer than vectors."""
    return min(max(config.request_timeout_s, GENERATION_S), config.max_timeout_s)


def generation_caller(request: web.Request, raw: bytes) -> RequestContext:
    """Return who asks for a generation, and until when."""
    router = request.app[ROUTER]
    return router.caller(request, raw, default_timeout_s=generation_timeout_s(router.config))


async def attached(
    request: web.Request, caller: RequestContext, began: float
) -> web.StreamResponse | None:
    """Answer with the request that the idempotency key stands for, after Last-Event-ID; None if there is none yet.

    Last-Event-ID without such a request is refused: a new answer would not go on where the old one stopped.
    """
    router, position = request.app[ROUTER], last_position(request)
    name = await router.admission.attach(caller)
    if name is not None:
        view = await view_of(router, name)
        if view is None:
            raise Conflict(
                "Idempotency-Key was used for another kind of request", code="idempotency_conflict"
            )
        known = ReaderAnswer(caller, name, view, source_of(router, name), position, fresh=False)
        return await deliver(request, known, began)
    if position is not None and caller.idempotency_key:
        raise NotFound(
            "Last-Event-ID: the request of this Idempotency-Key is unknown, failed or expired; send it anew without",
            code="request_not_found",
            param="Last-Event-ID",
        )
    if position is not None:
        raise InvalidRequest(
            "Last-Event-ID: expected together with the Idempotency-Key of the request it goes on with",
            code="invalid_header",
            param="Last-Event-ID",
        )
    return None


def door(router: Router, family: Family, made: GenerationSpec, view: ResponseOptions) -> JobSpec:
    """Return what is to be admitted; Unprocessable `exceeds_depth` if even an empty lane could not hold it."""
    items, tokens = router.depths.get(family.name, (0, 0))
    if items and (made.parcel.items > items or made.parcel.tokens > tokens):
        raise Unprocessable(
            f"this asks for {made.parcel.items} choices and {made.parcel.tokens} tokens at once: {view.model}'s "
            f"workers take at most {items} and {tokens} in time; ask for fewer choices, prompts or max_tokens",
            code="exceeds_depth",
        )
    return JobSpec(
        family,
        GENERATE_CLASSES,
        made.parcel,
        view,
        made.parcel.tokens,
        Prompt(made.session, made.version, made.marks, made.prompt_tokens),
    )


async def admitted(
    request: web.Request, caller: RequestContext, ask: JobSpec
) -> tuple[str, Subscription | None]:
    """Admit a generation and return its id and bell."""

    def named(name: str) -> None:
        request[REQUEST_ID] = name

    return await request.app[ROUTER].runner.open(caller, ask, named)
