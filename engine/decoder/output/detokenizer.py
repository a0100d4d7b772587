"""The detokenizer: text from token ids, one token at a time; the pieces joined equal the text decoded all at once.

Bytes of an incomplete character are held back. A byte-level tokenizer's tokens are bytes, which are decoded
incrementally; with any other tokenizer the text is decoded again from a token before the last delivered one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_UNSURE = "\ufffd"


class TextStream(Protocol):
    """The text of one growing list of tokens."""

    def push(self, token: int) -> str:
        """Add a token; return the new text that is certain by now."""

    def flush(self) -> str:
        """Return the rest of the text; call this after the last token."""


class Vocabulary:
    """The decoding side of a tokenizer, shared by all choices of a model; special tokens have no text."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        self._special = frozenset(special)
        kinds = _kinds(json.loads(tokenizer_json).get("decoder"))
        self._by_bytes = kinds == ["ByteLevel"]
        self._falls_back = "ByteFallback" in kinds
        self._bytes: dict[int, bytes] = {}

    def stream(self, shown: Sequence[int] = ()) -> TextStream:
        """Return a stream at the beginning of a text; special tokens in `shown` are part of the text."""
        if shown:
            return _MarkedStream(self, {token: self.name(token) for token in shown})
        return _ByteStream(self) if self._by_bytes else _DecodedStream(self)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of all of `tokens`."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def name(self, token: int) -> str:
        """Return a token as written in the vocabulary; empty for an unknown id."""
        return self._tokenizer.id_to_token(token) or ""

    def silent(self, token: int) -> bool:
        """True for a token that decoding skips: a special token or an unknown id."""
        name = self.name(token)
        return not name or name in self._special

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token; empty for special tokens and unknown ids."""
        found = self._bytes.get(token)
        if found is None:
            found = b"" if self.silent(token) else self._raw(self.name(token))
            self._bytes[token] = found
        return found

    def _raw(self, name: str) -> bytes:
        if self._by_bytes:
            try:
                return bytes(BYTE_OF[character] for character in name)
            except KeyError:  # an added token, which stands for its own text
                return name.encode()
        byte = _BYTE_TOKEN.match(name) if self._falls_back else None
        return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()

    def may_change(self, token: int) -> bool:
        """True for a token of one byte of a character, which later tokens may complete or make invalid."""
        return self._falls_back and _BYTE_TOKEN.match(self.name(token)) is not None


class _ByteStream:
    """The text of a byte-level tokenizer: the bytes of all tokens as UTF-8, with U+FFFD for invalid bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._vocabulary.raw(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _DecodedStream:
    """The text of any other tokenizer.

    The text is decoded from the last delivered token on, so that the decoder's special handling of a text's beginning
    cancels out.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._delivered = 0  # number of leading tokens whose text was delivered
        self._before = ""  # the text of these tokens

    def push(self, token: int) -> str:
        if self._vocabulary.silent(token):
            return ""
        self._tokens.append(token)
        text = self._vocabulary.decode(self._tokens)
        if text.endswith(_UNSURE) or self._vocabulary.may_change(token):
            return ""
        return self._deliver(text)

    def flush(self) -> str:
        return self._deliver(self._vocabulary.decode(self._tokens))

    def _deliver(self, text: str) -> str:
        gain = text[len(self._before) :]
        if gain:
            self._tokens = self._tokens[self._delivered :]
            self._delivered = len(self._tokens)
            self._before = self._vocabulary.decode(self._tokens)
        return gain


class _MarkedStream:
    """The text between special tokens, with the names of these tokens."""

    def __init__(self, vocabulary: Vocabulary, names: Mapping[int, str]) -> None:
        self._vocabulary, self._names = vocabulary, names
        self._stream = vocabulary.stream()

    def push(self, token: int) -> str:
        name = self._names.get(token)
        if name is None:
            return self._stream.push(token)
        text = self._stream.flush() + name
        self._stream = self._vocabulary.stream()
        return text

    def flush(self) -> str:
        return self._stream.flush()


def _kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _kinds(part)]
    return [decoder["type"]]


def _byte_of() -> dict[str, int]:
    """Return the byte for which each character of a byte-level vocabulary stands."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + number): byte for number, byte in enumerate(hidden)}


BYTE_OF = _byte_of()
