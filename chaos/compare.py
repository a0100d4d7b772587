"""Compare an answer given under faults with the answer of the undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loadgen.chat.answer import StreamedAnswer

# Two right answers in float32 may part only where the undisturbed run had no clear choice.
CLOSE = 1e-3


@dataclass(frozen=True, slots=True)
class Known:
    """One answer of the undisturbed run: its text, its end, and each token's bytes and top-2 gap.

    `gaps` are differences of log probabilities, which are those of logits; `greedy` is how it was drawn. `retrievals`
    say what an answer whose passages were found anew was given after which token, for which query.
    """

    text: str
    finish: str
    output_tokens: int
    greedy: bool
    tokens: tuple[bytes, ...] = ()
    gaps: tuple[float, ...] = ()
    passages: tuple[tuple[str, int, int], ...] = ()
    citations: tuple[tuple[int, str], ...] = ()
    retrievals: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer parts from the known one: byte offset, the known token's top-2 gap, and both texts there."""

    key: str
    at: int
    gap: float
    known: str
    found: str
    allowed: bool


@dataclass(slots=True)
class Comparison:
    """Counts what was compared and keeps every difference."""

    sequences: int = 0
    differences: list[Difference] = field(default_factory=list)

    def judge(self, key: str, known: Known, answer: StreamedAnswer) -> str:
        """Return "ok", or in which promise an answer breaks; an allowed difference is kept and is "ok"."""
        if answer.code:
            return f"{answer.code}: {answer.message[:200]}"
        if answer.wrong:
            return "; ".join(answer.wrong[:3])
        if known.passages and passages(answer) != known.passages:
            return f"passages {passages(answer)}, known {known.passages}"
        if retrievals(answer) != known.retrievals:
            return f"retrievals {retrievals(answer)}, known {known.retrievals}"
        self.sequences += 1
        found = difference(key, known, answer.text)
        if found is not None:
            self.differences.append(found)
            return "ok" if found.allowed else f"another answer: {found}"
        return _same_end(known, answer)


def _same_end(known: Known, answer: StreamedAnswer) -> str:
    if answer.finish.get(0) != known.finish:
        return f"finish_reason {answer.finish.get(0)}, known {known.finish}"
    if answer.output_tokens != known.output_tokens:
        return f"{answer.output_tokens} completion tokens, known {known.output_tokens}"
    if citations(answer) != known.citations:
        return f"citations {citations(answer)}, known {known.citations}"
    return "ok"


def difference(key: str, known: Known, text: str) -> Difference | None:
    """Return the first difference of `text` from the known one; None if there is none.

    It is allowed only in greedy answers, where the known run's top-2 gap at that token is below CLOSE.
    """
    ours, theirs = text.encode(), known.text.encode()
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    gap, end = float("inf"), 0
    for token, value in zip(known.tokens, known.gaps, strict=True):
        end += len(token)
        if at < end:
            gap = value
            break
    around = slice(max(0, at - 20), at + 20)
    return Difference(
        key, at, gap,
        theirs[around].decode("utf-8", "replace"), ours[around].decode("utf-8", "replace"),
        allowed=known.greedy and gap < CLOSE,
    )  # fmt: skip


def known_of(answer: StreamedAnswer, *, greedy: bool) -> Known:
    """Keep an undisturbed answer, asked for with `logprobs` and two alternatives."""
    return Known(
        text=answer.text,
        finish=answer.finish.get(0, ""),
        output_tokens=answer.output_tokens,
        greedy=greedy,
        tokens=tuple(bytes(each.get("bytes") or ()) for each in answer.logprobs),
        gaps=tuple(_gap(each) for each in answer.logprobs),
        passages=passages(answer),
        citations=citations(answer),
        retrievals=retrievals(answer),
    )


def _gap(token: dict[str, Any]) -> float:
    top = sorted((each["logprob"] for each in token.get("top_logprobs") or ()), reverse=True)
    return top[0] - top[1] if len(top) > 1 else float("inf")


def passages(answer: StreamedAnswer) -> tuple[tuple[str, int, int], ...]:
    """Return which passages an answer was given, in order: document, start and end."""
    found = (answer.retrieval or {}).get("passages") or ()
    return tuple((each["document_id"], each["start"], each["end"]) for each in found)


def citations(answer: StreamedAnswer) -> tuple[tuple[int, str], ...]:
    """Return an answer's citations: index and document."""
    return tuple((each["index"], each["document_id"]) for each in answer.citations)


def retrievals(answer: StreamedAnswer) -> tuple[tuple[Any, ...], ...]:
    """Return an answer's retrievals: the tokens before it and before its query, and the passages before and after."""
    every = (answer.retrieval or {}).get("retrievals") or ()
    return tuple(
        (each["at_token"], each["query_at"], tuple(each["passages"]), tuple(each["replaced"]))
        for each in every
    )
