"""Grammars over a model's vocabulary: which tokens may follow, so that an answer's text matches its grammar.

The state of a grammar is a pure function of the tokens drawn so far. It is kept from one draw to the next only to save
time: tokens taken back (a wrong guess), a step that is executed again and a log that another worker goes on with all
lead to the same mask.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from common.errors import InvalidRequest
from common.types.generation import OutputGrammar
from common.types.grammar import LIMITS, definition, unsatisfiable
from engine.decoder.executor.interface import TokenFilterError
from engine.decoder.output.detokenizer import Vocabulary

KEPT = 32  # compiled grammars


class CompiledGrammar(NamedTuple):
    """A grammar over a vocabulary, at its beginning; the text may end with one of `stop_ids`."""

    matcher: LLMatcher
    stop_ids: Sequence[int]

    def begin(self) -> GrammarState:
        """Return the state of one choice."""
        return GrammarState(self.matcher.deep_copy(), self.stop_ids)


class GrammarState:
    """The grammar of one choice, a `TokenFilter`; only the compute thread calls it."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int]) -> None:
        """`matcher` is at its beginning, and no other's."""
        self._matcher, self._stop_ids = matcher, list(stop_ids)
        self._taken: list[int] = []

    def allowed(self, output: Sequence[int]) -> bytes | None:
        """Return which token ids may follow `output`, a bit each; stop ids where the text may end.

        None after an output that does not match: a guess that is going to be dropped, or tokens after a stop id.
        TokenFilterError if the grammar's limits are reached, or no token spells what must follow.
        """
        if not self._follow(list(output)):
            return None
        found = bytearray(self._matcher.compute_bitmask())
        self._check()
        if self._matcher.is_accepting():
            for token in self._stop_ids:
                found[token // 8] |= 1 << token % 8
        if not any(found):
            raise TokenFilterError("no token of the model spells what the answer's grammar demands")
        return bytes(found)

    def _follow(self, output: list[int]) -> bool:
        """Bring the matcher to the state after `output`; False if the grammar does not allow it."""
        same = len(self._taken)
        if output[:same] != self._taken:
            pairs = enumerate(zip(output, self._taken, strict=False))
            shorter = min(len(output), len(self._taken))
            same = next((at for at, (new, old) in pairs if new != old), shorter)
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        more = output[same:]
        taken = self._matcher.try_consume_tokens(more) if more else 0
        self._check()
        self._taken += more[:taken]
        return taken == len(more)

    def _check(self) -> None:
        if self._matcher.is_error():
            why = _reason(self._matcher)
            raise TokenFilterError(f"the answer's grammar is too complex: {why}")


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps the last ones; any thread may call it."""

    def __init__(self, vocabulary: Vocabulary, size: int, stop_ids: Sequence[int]) -> None:
        """`size` is the number of token ids that the model has logits for."""
        self._vocabulary, self._size, self._stop_ids = vocabulary, size, list(stop_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[OutputGrammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: OutputGrammar, stop_ids: Sequence[int]) -> CompiledGrammar:
        """Return a grammar whose texts end with one of `stop_ids`; InvalidRequest says why it cannot be used.

        Takes milliseconds, and a few hundred for the first grammar of a large vocabulary.
        """
        with self._lock:
            matcher = self._compiled.pop(grammar, None) or self._new(grammar)
            self._compiled[grammar] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return CompiledGrammar(matcher, stop_ids)

    def _new(self, grammar: OutputGrammar) -> LLMatcher:
        if self._tokenizer is None:
            tokens = _Tokens(self._vocabulary, self._size, self._stop_ids)
            wrapped = TokenizerWrapper(tokens)
            self._tokenizer = LLTokenizer(wrapped, n_vocab=self._size, eos_token=self._stop_ids)
        try:
            matcher = LLMatcher(self._tokenizer, definition(grammar), log_level=0, limits=LIMITS)
            why = _reason(matcher) if matcher.is_error() else unsatisfiable(matcher)
        except ValueError as error:
            why = str(error)
        if why:
            raise InvalidRequest(
                f"the answer's {grammar.kind} cannot be used: {why}",
                code="invalid_grammar",
                param="response_format",
            )
        return matcher


class _Tokens:
    """A vocabulary's bytes as llguidance asks for them; special tokens and ids without one have names of their own."""

    def __init__(self, vocabulary: Vocabulary, size: int, stop_ids: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = stop_ids[0], None
        self.special_token_ids = [token for token in range(size) if vocabulary.silent(token)]
        self.tokens = [vocabulary.raw(token) for token in range(size)]
        for token in self.special_token_ids:
            self.tokens[token] = f"{vocabulary.name(token)} {token}".encode()

    def __call__(self, text: str | bytes) -> list[int]:  # noqa: ARG002 - as llguidance calls it
        """Return no tokens: text is encoded only where a grammar forces tokens, and ours do not."""
        return []


def _reason(matcher: LLMatcher) -> str:
    return next(iter(str(matcher.get_error()).splitlines()), "it cannot be read")[:300]
