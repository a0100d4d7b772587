"""One generate job from options and prompts: what both routes of generation end in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import InvalidRequest, TooLarge
from common.pages.identity import PageId, page_ids, root_id
from common.pages.prefix_hashes import marks_of
from common.wire.jobs import GenerateWork
from common.wire.message import encode
from common.wire.sessions import SessionTurn
from common.wire.workflows import GenerationOptions
from services.router.text.options import DEFAULT_NEW
from services.router.text.requests import Parcel
from services.router.text.tokens import Spec

BYTES_PER_TOKEN = 64


class GenerationSpec(NamedTuple):
    """One generate job: its parcel (items: choices; tokens: prompts + what may be generated), and what it continues.

    `marks` name the prefix of its first prompt to whoever may hold its pages.
    """

    parcel: Parcel
    prompt_tokens: int
    choices: int
    session: str = ""
    version: int = 0
    marks: Sequence[PageId] = ()


def generation_of(
    options: GenerationOptions,
    spec: Spec,
    scope: str,
    prompts: list[list[int]],
    *,
    turn: SessionTurn | None = None,
    forced: list[int] | None = None,
    param: str,
) -> GenerationSpec:
    """Return the job; InvalidRequest `context_length_exceeded` if prompt and answer do not fit the model's context."""
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    room = spec.max_tokens - longest
    max_new = options.max_new or max(min(room, DEFAULT_NEW), options.min_new)
    if room < 1 or max_new > room:
        asked = f"{max_new} in the completion" if options.max_new else "at least 1 to generate"
        raise InvalidRequest(
            f"{spec.name}'s context is {spec.max_tokens} tokens; this asks for {longest} in the {param} and {asked}; "
            "shorten one of them",
            code="context_length_exceeded",
            param=param,
        )
    work = GenerateWork(
        fingerprint=spec.fingerprint,
        scope=scope,
        prompts=prompts,
        max_new=max_new,
        n=options.n,
        sampling=options.sampling,
        min_new=options.min_new,
        stop=options.stop,
        stop_ids=options.stop_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        low=options.low,
        forced=forced,
        turn=turn,
    )
    choices = len(prompts) * options.n
    try:
        parcel = Parcel(encode(work), choices, total + choices * max_new)
    except ValueError as error:
        raise TooLarge(f"the request is too large: {error}") from None
    session, version = (turn.session, turn.version) if turn else ("", 0)
    marks = marks_of(page_ids(root_id(spec.fingerprint, scope), prompts[0]))
    return GenerationSpec(parcel, total, choices, session, version, marks)
