"""Grammars of structured output: llguidance beside xgrammar, on the schemas of the tests; one process a library.

    python -m bench.engine.grammars                 # llguidance, as the workers use it
    python -m bench.engine.grammars --library xgrammar    # where xgrammar 0.2.8 and what it needs are installed

Each schema is compiled, and a random walk of one-byte tokens under its masks makes an answer, which two validators
judge.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from common.clock import SYSTEM as CLOCK
from engine.decoder.output.detokenizer import Vocabulary
from tests.support.schemas import SCHEMAS, faults_of

DEMO = Path(__file__).resolve().parents[2] / "models/demo/tokenizer.json"
LARGE = 150_000  # tokens of the made-up vocabulary
STEPS = 120  # tokens of an answer at most
CLOSING = (b'"', b"}", b"]")  # preferred in its second half, so that answers end


class Walk(Protocol):
    """One answer under a grammar."""

    def mask(self) -> bytes:
        """Return which tokens may follow, a bit each."""

    def push(self, token: int) -> None:
        """Take a token."""


class GrammarTimes(NamedTuple):
    """What was found for one library and one vocabulary; times in seconds."""

    refused: list[str]
    wrong: list[str]
    cut: int
    compile_s: list[float]
    mask_s: list[float]


def demo_tokens() -> list[bytes]:
    """Return the tokens of the shipped model; special ones are empty, and token 2 ends an answer."""
    vocabulary = Vocabulary(DEMO.read_bytes())
    return [vocabulary.raw(token) for token in range(1536)]


def large_tokens() -> list[bytes]:
    """Return all bytes, many words with pieces of JSON, and an end."""
    rng = random.Random(0)
    words = {bytes([byte]): None for byte in range(256)}
    letters, pieces = (
        "etaoinshrdlcumwfgypbvkjxqz",
        ['":', '{"', '"}', '",', ": ", "\n  ", "], ", "},"],
    )
    while len(words) < LARGE:
        word = "".join(rng.choices(letters, weights=range(26, 0, -1), k=rng.randint(2, 9)))
        word = rng.choice(["", "", " ", " ", rng.choice(pieces)]) + word
        words[word.encode()] = None
    return [*words, b""]


class GuidanceWalks:
    """Grammars as the workers compile them."""

    def __init__(self, tokens: Sequence[bytes], stop: int) -> None:
        library = importlib.import_module("llguidance")
        self._library, self._stop = library, stop
        self.eos_token_id, self.bos_token_id, self.tokens = stop, None, list(tokens)
        self.special_token_ids = [at for at, token in enumerate(tokens) if not token]
        wrapped = library.TokenizerWrapper(self)
        self._tokenizer = library.LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=[stop])

    def __call__(self, _text: object) -> list[int]:
        """Return no tokens: text is encoded only where a grammar forces tokens."""
        return []

    def walk(self, schema: dict[str, Any]) -> Walk:
        """Return an answer's walk; ValueError if the schema is refused."""
        from common.types.generation import OutputGrammar  # noqa: PLC0415
        from common.types.grammar import LIMITS, definition  # noqa: PLC0415

        text = definition(OutputGrammar("json_schema", json.dumps(schema)))
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return _Steps(matcher.compute_bitmask, matcher.consume_token)


class XgrammarWalks:
    """Grammars of xgrammar with its defaults, but for properties that a schema does not name."""

    def __init__(self, tokens: Sequence[bytes], stop: int) -> None:
        self._library = library = importlib.import_module("xgrammar")
        shown = [token or b"<special>" for token in tokens]
        info = library.TokenizerInfo(
            shown, library.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[stop]
        )
        self._compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = library.allocate_token_bitmask(1, len(tokens))

    def walk(self, schema: dict[str, Any]) -> Walk:
        """Return an answer's walk; an error of the library if the schema is refused."""
        compiled = self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=True, strict_mode=False
        )
        matcher = self._library.GrammarMatcher(compiled)

        def mask() -> bytes:
            matcher.fill_next_token_bitmask(self._mask)
            return bytes(self._mask.numpy().tobytes())

        return _Steps(mask, matcher.accept_token)


class _Steps:
    """A walk made of two functions."""

    def __init__(self, mask: Callable[[], bytes], push: Callable[[int], object]) -> None:
        self.mask, self._push = mask, push

    def push(self, token: int) -> None:
        """Take a token."""
        self._push(token)


def measure(
    walks: GuidanceWalks | XgrammarWalks, tokens: Sequence[bytes], stop: int
) -> GrammarTimes:
    """Walk every schema once and return what was found."""
    found = GrammarTimes([], [], 0, [], [])
    for name, schema in SCHEMAS.items():
        began = CLOCK.perf_s()
        try:
            walk = walks.walk(schema)
        except Exception as error:  # noqa: BLE001 - whatever a library raises for a schema
            found.refused.append(f"{name}: {error}")
            continue
        found.compile_s.append(CLOCK.perf_s() - began)
        text = _answer(walk, tokens, stop, found.mask_s)
        if text is None:
            found = found._replace(cut=found.cut + 1)
        elif faults := faults_of(schema, text):
            found.wrong.append(f"{name}: {text[:60]!r}: {faults[0][:80]}")
    return found


def _answer(walk: Walk, tokens: Sequence[bytes], stop: int, times: list[float]) -> str | None:
    """Return an answer drawn at random; None if it did not end."""
    rng, said = np.random.default_rng(7), list[int]()
    for step in range(STEPS):
        began = CLOCK.perf_s()
        mask = walk.mask()
        times.append(CLOCK.perf_s() - began)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(tokens)]
        allowed: NDArray[np.int64] = np.nonzero(bits)[0]
        if stop in allowed:
            return b"".join(tokens[token] for token in said).decode(errors="replace")
        short = [token for token in allowed if len(tokens[token]) == 1] or list(allowed)
        closing = (
            [token for token in short if tokens[token] in CLOSING] if step > STEPS // 2 else []
        )
        said.append(int(rng.choice(closing or short)))
        walk.push(said[-1])
    return None


def main() -> None:
    """Print a line for each vocabulary, and what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=("llguidance", "xgrammar"), default="llguidance")
    library = parser.parse_args().library
    for kind, tokens, stop in (("demo", demo_tokens(), 2), ("large", large_tokens(), LARGE)):
        before = psutil.Process().memory_info().rss
        began = CLOCK.perf_s()
        walks = (GuidanceWalks if library == "llguidance" else XgrammarWalks)(tokens, stop)
        ready_s = CLOCK.perf_s() - began
        found = measure(walks, tokens, stop)
        size = (psutil.Process().memory_info().rss - before) / 1e6
        print(
            f"{library} {kind}: {len(SCHEMAS)} schemas, refused {len(found.refused)}, wrong {len(found.wrong)}, "
            f"cut {found.cut}; ready {ready_s:.2f} s; compile {_ms(found.compile_s)}; mask {_ms(found.mask_s)}; "
            f"{size:.0f} MB"
        )
        for line in (*found.refused, *found.wrong):
            print(f"  {line}")


def _ms(times: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(times):.3f} ms, at most {1e3 * max(times):.1f}"


if __name__ == "__main__":
    main()
