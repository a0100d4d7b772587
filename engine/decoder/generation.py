"""Generations: a caller's request to the engine, and the choices that the engine computes for the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.pages.identity import Owner, PageId
from common.types.generation import SamplingParams
from engine.decoder.executor.step import StepFailure
from engine.decoder.output.choice import Choice, StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sampling.grammar import CompiledGrammar
from engine.decoder.sequence import Range, TokenSequence


class GenerationRequest(NamedTuple):
    """A request for `n` continuations of each prompt (token ids); choice c belongs to prompt c // n.

    `root` is the parent id of first pages, `owner` the owner of all pages. Texts longer than `short_context` tokens
    have pages of their own kind (0: no text does). `forced` is an answer to return instead of a computed one.
    `logprobs` is the number of alternatives to report for each token, -1 for none. `low` requests wait for all others;
    among equals the earliest `due_ms` goes first. The text of each choice matches `grammar`, unless the text is cut
    off; special tokens in `shown` are part of the text. `spans` are the ranges of tokens of passages in the prompt that
    are computed alone (see `TokenSequence`); only a request with one prompt has any.
    """

    id: str
    prompts: Sequence[Sequence[int]]
    stop: StopRules
    root: PageId
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    logprobs: int = -1
    forced: Sequence[int] | None = None
    owner: Owner = b""
    low: bool = False
    due_ms: int = 0
    grammar: CompiledGrammar | None = None
    shown: Sequence[int] = ()
    short_context: int = 0
    spans: Sequence[Range] = ()


class Generation:
    """A request in the engine: a choice for each continuation, and the failure that ended the request, if any."""

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, order: int) -> None:
        """`order` is the first choice's place in the order of arrival; each choice takes one place."""
        self.id, self.request = request.id, request
        self.failure: StepFailure | None = None
        self.choices = [
            self._choice(number, vocabulary, order)
            for number in range(len(request.prompts) * request.n)
        ]

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences of choices that have not ended."""
        return [choice.sequence for choice in self.choices if choice.finish is None]

    @property
    def over(self) -> bool:
        """True if nothing more will be generated."""
        return self.failure is not None or all(choice.finish for choice in self.choices)

    def start(self) -> None:
        """End the choices that need no computing: forced answers, and choices that were restored complete."""
        for choice in self.choices:
            if choice.finish is None and self.request.forced is not None:
                choice.force(self.request.forced)
            choice.start()

    def _choice(self, number: int, vocabulary: Vocabulary, order: int) -> Choice:
        request = self.request
        prompt = request.prompts[number // request.n]
        sequence = TokenSequence(
            request.id,
            number,
            order + number,
            prompt,
            root=request.root,
            most=len(prompt) + request.stop.max_new,
            due_ms=request.due_ms,
            low=request.low,
            owner=request.owner,
            short_context=request.short_context,
            spans=request.spans,
        )
        return Choice(
            sequence,
            vocabulary,
            request.stop,
            sampling=request.sampling,
            logprobs=request.logprobs,
            forced=request.forced is not None,
            grammar=request.grammar and request.grammar.begin(),
            shown=request.shown,
        )
