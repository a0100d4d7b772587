"""The caller of a request, and the job that the request becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from common.ids import Family
from common.pages.identity import PageId
from common.registry.api_keys import ApiKey
from common.wire.workflows import ResponseOptions
from services.router.text.requests import Parcel


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a request, its deadline, and the consequence of a disconnect.

    `own` means that the client or its key set the deadline; `share` below 1 leaves the rest of a lane to others. The
    request was complete at `came_ms` (0: not known).
    """

    tenant: str
    key: ApiKey | None
    deadline_ms: int
    came_ms: int = 0
    own: bool = False
    share: float = 1.0
    resume_s: float = 0.0
    idempotency_key: str = ""
    body_hash: bytes = b""

    @property
    def low(self) -> bool:
        """Whether requests of normal priority go first."""
        return self.share < 1

    @property
    def attached(self) -> bool:
        """Whether a disconnect cancels the request."""
        return self.resume_s <= 0 and not self.idempotency_key


class Prompt(NamedTuple):
    """The parts of a prompt that admission needs; `session` and `marks` lead to the worker that holds the pages.

    With `session` the job is the session's next turn after `version`; `marks` are every 8th page id of the prompt,
    which has `tokens` tokens. `question` marks the question of a search, of which no worker holds pages.
    """

    session: str = ""
    version: int = 0
    marks: Sequence[PageId] = ()
    tokens: int = 0
    question: bool = False


NO_PROMPT = Prompt()
QUESTION = Prompt(question=True)


class JobSpec(NamedTuple):
    """A request that is one job: its family and classes, its size, and the format of its response.

    `charge_tokens` are charged to the key's quota; `view.tokens` of them are input.
    """

    family: Family
    classes: Sequence[str]
    parcel: Parcel
    view: ResponseOptions
    charge_tokens: int = 0
    prompt: Prompt = NO_PROMPT
