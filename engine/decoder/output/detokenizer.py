"""The detokenizer: text from token ids, one token at a time; the pieces joined equal the text decoded all at once.

Bytes that are not yet a whole character are held back. With a byte-level tokenizer a token is bytes, and these are
decoded incrementally; with any other the text is decoded anew from a token before the last one delivered.
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
        """Add a token; return the text that is certain by now and was not returned before."""

    def flush(self) -> str:
        """Return the rest of the text; no token follows."""


class Vocabulary:
    """A tokenizer's decoding side; special tokens have no text. Shared by all choices of a model."""

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
        """Return a stream at the beginning of a text; special tokens that are `shown` are part of it."""
        if shown:
            return _MarkedStream(self, {token: self.name(token) for token in shown})
        return _ByteStream(self) if self._by_bytes else _DecodedStream(self)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of all of `tokens`."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def name(self, token: int) -> str:
        """Return a token as the vocabulary writes it; "" for an id it does not have."""
        return self._tokenizer.id_to_token(token) or ""

    def silent(self, token: int) -> bool:
        """True for a token that decoding skips: a special one, or an id the vocabulary does not have."""
        name = self.name(token)
        return not name or name in self._special

    def raw(self, token: int) -> bytes:
        """Return the bytes a token stands for; none for special tokens and unknown ids."""
        found = self._bytes.get(token)
        if found is None:
            found = b"" if self.silent(token) else self._raw(self.name(token))
            self._bytes[token] = found
        return found

    def _raw(self, name: str) -> bytes:
        if self._by_bytes:
            try:
                return bytes(BYTE_OF[character] for character in name)
            except KeyError:  # an added token, written as it is
                return name.encode()
        byte = _BYTE_TOKEN.match(name) if self._falls_back else None
        return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()

    def may_change(self, token: int) -> bool:
        """True for a token that decodes to one byte of a character which later tokens may complete or spoil."""
        return self._falls_back and _BYTE_TOKEN.match(self.name(token)) is not None


class _ByteStream:
    """Text of a byte-level tokenizer: the bytes of all tokens as UTF-8, with U+FFFD for invalid bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._vocabulary.raw(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _DecodedStream:
    """Text of any other tokenizer.

    It is decoded from the last delivered token on, so that the decoder's changes at the beginning of a text cancel out.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._delivered = 0  # tokens at the front whose text was delivered
        self._before = ""  # their text

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
    """Text between special tokens, and the names of these tokens."""

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
    """Return the byte each character of a byte-level vocabulary stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + number): byte for number, byte in enumerate(hidden)}


BYTE_OF = _byte_of()
