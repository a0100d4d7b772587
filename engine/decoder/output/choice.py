"""The choice of a generation: its drawn tokens, its certain text, and its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.errors import InternalError
from common.types.generation import FinishReason, Logprob, SamplingParams
from engine.decoder.executor.interface import SampledToken, SamplingRequest, TokenFilter
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.output.stop_strings import StopStrings
from engine.decoder.prompt_lookup import PromptLookup
from engine.decoder.sequence import TokenSequence


class StopRules(NamedTuple):
    """A choice ends at one of `ids`, before one of `strings`, or after `max_new` tokens; not before `min_new`."""

    max_new: int
    min_new: int = 0
    strings: Sequence[str] = ()
    ids: Sequence[int] = ()


class ChoiceOutput(NamedTuple):
    """Tokens and certain text that a choice gained; the last output has the reason of the end and the stop string."""

    tokens: list[int]
    text: str = ""
    finish: FinishReason | None = None
    stopped_by: str | None = None
    logprobs: Sequence[Logprob] = ()


class Choice:
    """A choice: takes drawn tokens by `push`, returns gained output by `take`; `finish` is set once it has ended."""

    def __init__(
        self,
        sequence: TokenSequence,
        vocabulary: Vocabulary,
        rules: StopRules,
        *,
        sampling: SamplingParams,
        logprobs: int = -1,
        forced: bool = False,
        grammar: TokenFilter | None = None,
        shown: Sequence[int] = (),
    ) -> None:
        """With `forced` the rules do not apply, and restored output is accepted unchecked.

        A `grammar`, if given, determines in place of `min_new` when the choice may end. Special tokens in `shown` are
        part of the text.
        """
        self.number, self.sequence = sequence.choice, sequence
        self.finish: FinishReason | None = None
        self.stopped_by: str | None = None
        self.lookup: PromptLookup | None = None  # guesses the next tokens, where the engine drafts
        self.boundary: int | None = (
            None  # the choice pauses after this many tokens, until the value changes
        )
        self._rules, self._sampling = rules, sampling
        self._alternatives, self._forced, self._grammar = logprobs, forced, grammar
        self._vocabulary = vocabulary
        self._stream = vocabulary.stream(shown)
        self._stops = StopStrings(rules.strings)
        self._stop_ids = frozenset(rules.ids)
        self._tokens: list[int] = []  # drawn; the sequence gets them when its pages are settled
        self._ends: list[int] = []  # length of the text after each token, including stop strings
        self._text = 0  # length of the text delivered
        self._gained: list[int] = []
        self._gained_text = ""
        self._logprobs: list[Logprob] = []
        self._told = False

    @property
    def tokens(self) -> Sequence[int]:
        """All drawn tokens, without the stop token."""
        return self._tokens

    @property
    def kept(self) -> list[int]:
        """The tokens of the delivered text, without tokens that begin in or after a stop string."""
        if self.stopped_by not in self._rules.strings:
            return list(self._tokens)
        starts = [0, *self._ends[:-1]]
        return [t for t, at in zip(self._tokens, starts, strict=True) if at < self._text]

    def draw(self, ahead: int = 0, guesses: Sequence[int] = ()) -> SamplingRequest:
        """Return the request to draw the next token, or the token `ahead` places later, after `guesses`."""
        output = self.sequence.output
        early = self._grammar is None and len(output) + ahead < self._rules.min_new
        return SamplingRequest(
            sampling=self._sampling,
            choice=self.number,
            position=self.sequence.length + ahead,
            prompt=self.sequence.prompt,
            output=[*output, *guesses] if ahead else output,
            banned=tuple(self._stop_ids) if early else (),
            logprobs=self._alternatives,
            grammar=self._grammar,
        )

    @property
    def room(self) -> int:
        """The number of tokens that the choice may still get, up to its end or its boundary."""
        most = self._rules.max_new
        return (most if self.boundary is None else min(most, self.boundary)) - len(self._tokens)

    def push(self, drawn: SampledToken) -> int | None:
        """Take a drawn token; return it, or None for a stop id, which is not part of the output."""
        if drawn.token in self._stop_ids:
            self._end("stop", self._vocabulary.name(drawn.token))
            return None
        self._gained.append(drawn.token)
        if self._alternatives >= 0:
            self._logprobs.append(self._logprob(drawn))
        self._add(drawn.token)
        return drawn.token

    def force(self, tokens: Iterable[int]) -> None:
        """Take a whole answer that was not computed."""
        for token in tokens:
            self._gained.append(token)
            self._tokens.append(token)
            self._deliver(self._stream.push(token))
        self._deliver(self._stream.flush())
        self.finish = "stop"

    def start(self) -> None:
        """End the choice at once if it may get no token."""
        if self.finish is None and self._rules.max_new == 0:
            self._end("length")

    def restore(self, outputs: Iterable[ChoiceOutput]) -> None:
        """Continue after earlier `outputs`; InternalError if their text does not match their tokens."""
        text = ""
        for output in outputs:
            text += output.text
            if self._forced:
                self._tokens += output.tokens
                self._gained_text += output.text
            else:
                for token in output.tokens:
                    self._add(token)
            if output.finish is not None:
                if self.finish is None and not self._forced:
                    self._end(output.finish)
                self.finish, self.stopped_by, self._told = output.finish, output.stopped_by, True
        if self._gained_text != text:
            raise InternalError(f"choice {self.number}: its log does not agree with its tokens")
        self._gained_text = ""

    def take(self) -> ChoiceOutput | None:
        """Return the output gained since the last call; None if there is no new output."""
        finish = None if self._told else self.finish
        if not self._gained and not self._gained_text and finish is None:
            return None
        output = ChoiceOutput(
            self._gained,
            self._gained_text,
            finish,
            self.stopped_by if finish else None,
            self._logprobs,
        )
        self._gained, self._gained_text, self._logprobs = [], "", []
        self._told = finish is not None or self._told
        return output

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        if self.lookup is not None:
            self.lookup.append(token)
        text = self._stream.push(token)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(text))
        if len(self._tokens) < self._rules.min_new:
            self._deliver(text)  # `min_new` is not reached: the stop string is delivered as text
        else:
            self._watch(text)
        if self.finish is None and len(self._tokens) >= self._rules.max_new:
            self._end("length")

    def _watch(self, text: str) -> None:
        text, stop = self._stops.push(text)
        self._deliver(text)
        if stop is not None:
            self.finish, self.stopped_by = "stop", stop

    def _end(self, finish: FinishReason, stopped_by: str | None = None) -> None:
        """End the choice, and deliver the text that was held back, unless it is a stop string."""
        self._watch(self._stream.flush())
        if self.finish is None:
            self._deliver(self._stops.flush())
            self.finish, self.stopped_by = finish, stopped_by

    def _deliver(self, text: str) -> None:
        self._gained_text += text
        self._text += len(text)

    def _logprob(self, drawn: SampledToken) -> Logprob:
        raw = self._vocabulary.raw
        top = [Logprob(id=token, raw=raw(token), logprob=value) for token, value in drawn.top]
        return Logprob(id=drawn.token, raw=raw(drawn.token), logprob=drawn.logprob, top=top)
