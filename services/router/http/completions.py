"""POST /v1/completions, as OpenAI's clients send it."""

from __future__ import annotations

import time
from functools import partial

from aiohttp import web

from common.wire.workflows import ResponseOptions
from services.router.http.context import ROUTER
from services.router.http.generations import admitted, attached, door, generation_caller
from services.router.responses.answers import ReaderAnswer, deliver
from services.router.responses.sources import kept
from services.router.text import completions
from services.router.text.pool import INLINE_TEXT_BYTES


async def create(request: web.Request) -> web.StreamResponse:
    """Continue prompts: one generate job, attached to if its idempotency key knows it."""
    router, began = request.app[ROUTER], time.perf_counter()
    raw = await router.body(request)
    caller = generation_caller(request, raw)
    again = await attached(request, caller, began)
    if again is not None:
        return again
    specs, default = await router.cards.specs(), await router.cards.generate_default()
    most = router.config.max_tokens
    call = partial(completions.completion, raw, specs, default, caller.tenant, most, low=caller.low)
    ask, made = await router.pool.run(call, inline=len(raw) < INLINE_TEXT_BYTES)
    view = ResponseOptions(
        kind="completion",
        model=ask.model,
        tokens=made.prompt_tokens,
        fingerprint=specs[ask.model].fingerprint,
        choices=made.choices,
        stream=ask.stream,
        include_usage=ask.include_usage,
        logprobs=ask.options.logprobs,
        echo=ask.echo,
    )
    family = await router.cards.family(ask.model, request.remote or "", router.next_turn())
    name, bell = await admitted(request, caller, door(router, family, made, view))
    return await deliver(request, ReaderAnswer(caller, name, view, kept(name, bell)), began)
