"""Grammars over a model's vocabulary: they filter the next tokens so that an answer's text matches its grammar.

The state of a grammar is a pure function of the tokens drawn so far, and is kept between draws only to save time. So
the mask is the same after a wrong guess was taken back, in a repeated step, and when another worker continues a log.
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

KEPT = 32  # compiled grammars in the cache


class CompiledGrammar(NamedTuple):
    """A grammar compiled for a vocabulary, in its initial state; the text may end with one of `stop_ids`."""

    matcher: LLMatcher
    stop_ids: Sequence[int]

    def begin(self) -> GrammarState:
        """Return the initial state for one choice."""
        return GrammarState(self.matcher.deep_copy(), self.stop_ids)


class GrammarState:
    """The grammar of one choice, a `TokenFilter`; only the compute thread calls it."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int]) -> None:
        """`matcher` must be in its initial state, and belong to this state only."""
        self._matcher, self._stop_ids = matcher, list(stop_ids)
        self._taken: list[int] = []

    def allowed(self, output: Sequence[int]) -> bytes | None:
        """Return one bit for each token id: whether it may follow `output`; stop ids may where the text may end.

        None after an output that does not match: a wrong guess, or tokens after a stop id. TokenFilterError if the
        grammar's limits are reached, or no token spells the required text.
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
        """Bring the matcher to the state after `output`; False if the grammar does not allow `output`."""
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
    """Compiles grammars for one vocabulary and caches the latest ones; any thread may call it."""

    def __init__(self, vocabulary: Vocabulary, size: int, stop_ids: Sequence[int]) -> None:
        """`size` is the number of token ids in the model's logits."""
        self._vocabulary, self._size, self._stop_ids = vocabulary, size, list(stop_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[OutputGrammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: OutputGrammar, stop_ids: Sequence[int]) -> CompiledGrammar:
        """Return a grammar whose texts end with one of `stop_ids`; InvalidRequest if it cannot be compiled.

        This takes milliseconds, and a few hundred for the first grammar of a large vocabulary.
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
    """A vocabulary's bytes in the form that llguidance needs; special tokens and unused ids have generated names."""

    def __init__(self, vocabulary: Vocabulary, size: int, stop_ids: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = stop_ids[0], None
        self.special_token_ids = [token for token in range(size) if vocabulary.silent(token)]
        self.tokens = [vocabulary.raw(token) for token in range(size)]
        for token in self.special_token_ids:
            self.tokens[token] = f"{vocabulary.name(token)} {token}".encode()

    def __call__(self, text: str | bytes) -> list[int]:  # noqa: ARG002 - as llguidance calls it
        """Return no tokens: llguidance encodes text only for grammars that force tokens, which these do not."""
        return []


def _reason(matcher: LLMatcher) -> str:
    return next(iter(str(matcher.get_error()).splitlines()), "it cannot be read")[:300]
