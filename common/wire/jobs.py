"""The work of jobs for workers: one tagged union."""

from __future__ import annotations

import msgspec

from common.types.generation import OutputGrammar, SamplingParams
from common.wire.control import ExtensionRule
from common.wire.message import Message, _checked
from common.wire.search import CopyWork, DocumentsWork, SearchWork
from common.wire.sessions import SessionTurn, SessionWork
from common.wire.workflows import RequestWork


class EmbedWork(Message, frozen=True, tag="embed"):
    """Embed token lists; `fingerprint` must be that of the worker's model.

    A `question` is the query of a search, which waits for its vector, so it may run before other texts.
    """

    fingerprint: str
    tokens: list[list[int]]
    question: bool = False


class ScoreWork(Message, frozen=True, tag="score"):
    """Score documents against one query.

    With a cross-encoder `pairs` holds the joined token lists and `types` their token types; with an encoder
    `query` and `documents` are embedded and compared by cosine.
    """

    fingerprint: str
    query: list[int] = []
    documents: list[list[int]] = []
    pairs: list[list[int]] = []
    types: list[list[int]] = []


class GenerateWork(Message, frozen=True, tag="generate"):
    """Generate `n` continuations of each prompt (token ids, history included); choice c belongs to prompt c // n.

    Generation of a choice ends at one of `stop_ids` (unless `ignore_eos`), before the text of one of `stop`, or after
    `max_new` tokens; not before `min_new`. `logprobs` is how many alternatives to report for each token, -1 for none.
    `forced` is an answer to give instead of computing one. `scope` keeps tenants' pages apart. A generation with `low`
    priority waits for all others. The text of every choice matches `grammar`, if there is one and the answer is not cut
    off. `shown` are special tokens that are part of the text. `extensions` gives the boundaries at which the prompt of
    a single choice may be extended. `spans` are ranges [begin, end) of tokens of passages in the only prompt, whose
    keys and values are computed behind the prompt's first token alone, and turned to their places: an approximation.
    """

    fingerprint: str
    scope: str
    prompts: list[list[int]]
    max_new: int
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    min_new: int = 0
    stop: list[str] = []
    stop_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int = -1
    low: bool = False
    forced: list[int] | None = None
    turn: SessionTurn | None = None
    grammar: OutputGrammar | None = None
    shown: list[int] = []
    extensions: ExtensionRule | None = None
    spans: list[tuple[int, int]] = []


Work = (
    EmbedWork
    | ScoreWork
    | SearchWork
    | DocumentsWork
    | CopyWork
    | RequestWork
    | GenerateWork
    | SessionWork
)


_work = msgspec.msgpack.Decoder(Work)


def decode_work(data: bytes) -> Work:
    """Decode a job's payload by its tag; BadMessage for other bytes."""
    work: Work = _checked(_work, "work", data)
    return work
