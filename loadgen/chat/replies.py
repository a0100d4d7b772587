"""Statistics of chat requests: TTFT, TPOT, ITL, end to end, latency per token, goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from loadgen import stats
from loadgen.chat.answer import StreamedAnswer

REFUSED = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Goal:
    """The limits of goodput: an answer's seconds to the first token, and per later token."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Reply:
    """One answered or failed request; moments are seconds from the run's start.

    `gaps_s` are the seconds between its pieces as they came: the inter-token latencies, as a client sees them. A
    piece holds one token unless the server was ahead of the reader, so there may be fewer gaps than tokens.
    """

    kind: str
    turn: int
    due_s: float
    sent_s: float
    done_s: float
    status: int
    code: str = ""
    first_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gaps_s: tuple[float, ...] = field(default=())
    resumes: int = 0

    @property
    def ok(self) -> bool:
        """True if the answer is whole."""
        return 200 <= self.status < 300 and not self.code

    @property
    def ttft_s(self) -> float | None:
        """Return the seconds from the due time to the first token; None without a token."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def latency_s(self) -> float:
        """Return the seconds from the due time to the end."""
        return self.done_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean seconds per token after the first; None for an answer of one token."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.done_s - self.first_s) / (self.output_tokens - 1)

    @property
    def normalized_s(self) -> float | None:
        """Return the latency divided by the number of output tokens; None without a token."""
        return self.latency_s / self.output_tokens if self.output_tokens else None

    def meets(self, goal: Goal) -> bool:
        """Return whether the answer is whole and within both limits; one token meets any TPOT."""
        ttft, tpot = self.ttft_s, self.tpot_s
        return self.ok and ttft is not None and ttft <= goal.ttft_s and (tpot or 0.0) <= goal.tpot_s


def reply(
    answer: StreamedAnswer,
    *,
    kind: str,
    turn: int,
    began: float,
    due: float,
    sent: float,
    done: float,
) -> Reply:
    """Return the reply of an answer; `began` is the run's start, monotonic like the answer's moments."""
    moments = answer.at_s
    return Reply(
        kind=kind, turn=turn, due_s=due, sent_s=sent, done_s=done, status=answer.status,
        code=answer.code or ("wrong_stream" if answer.wrong else ""),
        first_s=moments[0] - began if moments else None,
        prompt_tokens=answer.prompt_tokens, cached_tokens=answer.cached_tokens,
        output_tokens=answer.output_tokens,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(moments)),
        resumes=answer.resumes,
    )  # fmt: skip


def summary(
    replies: Sequence[Reply], seconds: float, goal: Goal, cpu_s: float = 0.0
) -> dict[str, Any]:
    """Return counts, rates, percentiles and goodput (whole answers within `goal`, per second of the run)."""
    ok = [r for r in replies if r.ok]
    refused = [r for r in replies if not r.ok and r.status in REFUSED]
    seconds = max(seconds, 1e-9)
    within = sum(1 for r in ok if r.meets(goal))
    return {
        "requests": len(replies),
        "ok": len(ok),
        "refused": len(refused),
        "errors": len(replies) - len(ok) - len(refused),
        "codes": dict(Counter(r.code or f"status_{r.status}" for r in replies if not r.ok)),
        "resumes": sum(r.resumes for r in replies),
        "seconds": seconds,
        "requests_per_s": len(ok) / seconds,
        "prompt_tokens": sum(r.prompt_tokens for r in ok),
        "cached_tokens": sum(r.cached_tokens for r in ok),
        "output_tokens": sum(r.output_tokens for r in ok),
        "output_tokens_per_s": sum(r.output_tokens for r in ok) / seconds,
        "ttft_s": stats.percentiles([r.ttft_s for r in ok if r.ttft_s is not None]),
        "tpot_s": stats.percentiles([r.tpot_s for r in ok if r.tpot_s is not None]),
        "itl_s": stats.percentiles([gap for r in ok for gap in r.gaps_s]),
        "latency_s": stats.percentiles([r.latency_s for r in ok]),
        "normalized_s": stats.percentiles(
            [r.normalized_s for r in ok if r.normalized_s is not None]
        ),
        "sent_late_s": stats.percentiles([r.sent_s - r.due_s for r in replies]),
        "goal": {"ttft_s": goal.ttft_s, "tpot_s": goal.tpot_s},
        "goodput_per_s": within / seconds,
        "within_goal": within / max(1, len(replies)),
        "loadgen_cpu_s": cpu_s,
    }
