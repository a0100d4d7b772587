"""Generations: the request of a caller to the engine, and the choices that the engine computes for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.pages.identity import Owner, PageId
from common.types.generation import SamplingParams
from engine.decoder.executor.step import StepFailure
from engine.decoder.output.choice import Choice, StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sampling.grammar import CompiledGrammar
from engine.decoder.sequence import TokenSequence


class GenerationRequest(NamedTuple):
    """A request for `n` continuations of each prompt (token ids); choice c belongs to prompt c // n.

    `root` is the parent id of first pages, `owner` the owner of all pages; texts longer than `short_context` tokens
    have other pages (0: at no length). `forced` is an answer to give instead of
    computing one. `logprobs` is how many alternatives to report for each token, -1 for none. Requests that are `low`
    wait for those that are not; among equals the earliest `due_ms` goes first. The text of each choice matches
    `grammar`, unless it is cut off; special tokens that are `shown` are part of it.
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


class Generation:
    """A request in the engine: a choice for each continuation, and the failure that ended it, if one did."""

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, order: int) -> None:
        """`order` is the place of the first choice in the order of arrival; each choice takes one place."""
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
        """End the choices that have nothing to compute: forced answers, and those that are complete."""
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
