"""One choice of a generation: the tokens drawn for it, the text that is certain, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.errors import InternalError
from common.types.generation import FinishReason, Logprob
from common.wire.jobs import GenerateWork
from common.wire.results import Piece
from engine.decoder.executor.interface import SampledToken, SamplingRequest
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.output.stop_strings import StopStrings
from engine.decoder.sequence import TokenSequence


class Choice:
    """Takes tokens by `push`, gives what they brought by `take`; `finish` is set once it has ended."""

    def __init__(
        self, number: int, work: GenerateWork, sequence: TokenSequence, vocabulary: Vocabulary
    ) -> None:
        self.number, self.work, self.sequence = number, work, sequence
        self.finish: FinishReason | None = None
        self.stopped_by: str | None = None
        self._vocabulary = vocabulary
        self._stream = vocabulary.stream()
        self._stops = StopStrings(work.stop)
        self._stop_ids = frozenset(() if work.ignore_eos else work.stop_ids)
        self._tokens: list[int] = []  # drawn; the sequence has them too, once its pages are settled
        self._ends: list[int] = []  # length of the text after each token, stop strings included
        self._text = 0  # length of the text delivered
        self._gained: list[int] = []
        self._gained_text = ""
        self._logprobs: list[Logprob] = []
        self._told = False

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens drawn, without the stop token."""
        return self._tokens

    @property
    def kept(self) -> list[int]:
        """The tokens of the delivered text: what begins in or after a stop string is left out."""
        if self.stopped_by not in self.work.stop:
            return list(self._tokens)
        starts = [0, *self._ends[:-1]]
        return [t for t, at in zip(self._tokens, starts, strict=True) if at < self._text]

    def draw(self) -> SamplingRequest:
        """Return how to draw the next token."""
        work, output = self.work, self.sequence.output
        return SamplingRequest(
            sampling=work.sampling,
            choice=self.number,
            position=self.sequence.length,
            prompt=self.sequence.prompt,
            output=output,
            banned=tuple(self._stop_ids) if len(output) < work.min_new else (),
            logprobs=work.logprobs,
        )

    def push(self, drawn: SampledToken) -> int | None:
        """Take a drawn token; return it, or None if it is a stop id, which is no part of the output."""
        if drawn.token in self._stop_ids:
            self._end("stop", self._vocabulary.name(drawn.token))
            return None
        self._gained.append(drawn.token)
        if self.work.logprobs >= 0:
            self._logprobs.append(self._logprob(drawn))
        self._add(drawn.token)
        return drawn.token

    def force(self, tokens: Iterable[int]) -> None:
        """Take the whole answer, which was not computed."""
        for token in tokens:
            self._gained.append(token)
            self._tokens.append(token)
            self._deliver(self._stream.push(token))
        self._deliver(self._stream.flush())
        self.finish = "stop"

    def start(self) -> None:
        """End at once if nothing may be generated."""
        if self.finish is None and self.work.max_new == 0:
            self._end("length")

    def restore(self, pieces: Iterable[Piece]) -> None:
        """Go to where the logged `pieces` of this choice end; InternalError if they are not what its tokens give."""
        text = ""
        for piece in pieces:
            text += piece.text
            if self.work.forced is None:
                for token in piece.tokens:
                    self._add(token)
            else:
                self._tokens += piece.tokens
                self._gained_text += piece.text
            if piece.finish is not None:
                if self.finish is None and self.work.forced is None:
                    self._end(piece.finish)
                self.finish, self.stopped_by, self._told = piece.finish, piece.stopped_by, True
        if self._gained_text != text:
            raise InternalError(f"choice {self.number}: its log does not agree with its tokens")
        self._gained_text = ""

    def take(self, at: int) -> Piece | None:
        """Return what came since the last call as a piece of event `at`; None if nothing did."""
        finish = None if self._told else self.finish
        if not self._gained and not self._gained_text and finish is None:
            return None
        piece = Piece(
            at=at,
            choice=self.number,
            tokens=self._gained,
            text=self._gained_text,
            finish=finish,
            stopped_by=self.stopped_by if finish else None,
            logprobs=self._logprobs,
        )
        self._gained, self._gained_text, self._logprobs = [], "", []
        self._told = finish is not None or self._told
        return piece

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        text = self._stream.push(token)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(text))
        if len(self._tokens) < self.work.min_new:
            self._deliver(text)  # too early to stop
        else:
            self._watch(text)
        if self.finish is None and len(self._tokens) >= self.work.max_new:
            self._end("length")

    def _watch(self, text: str) -> None:
        text, stop = self._stops.push(text)
        self._deliver(text)
        if stop is not None:
            self.finish, self.stopped_by = "stop", stop

    def _end(self, finish: FinishReason, stopped_by: str | None = None) -> None:
        """End here: what was held back is delivered, unless it turns out to be a stop string."""
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
