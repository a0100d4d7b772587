"""Token ids of texts, exactly as the workers' encoder expects them; the tokenizer comes from the model's card.

A tokenizer is loaded at most once per process and path: by the router for short texts, by text processes for others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from common.errors import InvalidRequest
from common.types.model_card import ModelCard
from services.router.text.chunks import TextPiece, split
from services.router.text.overflow import overflow


class Spec(ModelCard, frozen=True, kw_only=True):
    """A model's card, and the path of its tokenizer.json, for the text processes."""

    path: str


class Encoding(NamedTuple):
    """Token ids of one text with special tokens, and the number of tokens cut off (0 without truncation)."""

    ids: list[int]
    cut: int


class TextEncoder:
    """One tokenizer without its own truncation and padding, and the special tokens that it puts around a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(ids, default=-1) + 1  # some smaller ids may be unused
        marked = tokenizer.encode("a", add_special_tokens=True)
        bare = tokenizer.encode("a", add_special_tokens=False).ids
        at = next((i for i in range(len(marked.ids)) if marked.ids[i : i + len(bare)] == bare), 0)
        self.prefix: list[int] = marked.ids[:at]
        self.suffix: list[int] = marked.ids[at + len(bare) :]
        added = tokenizer.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}
        self._folds = any(t.normalized for t in added.values() if t.special)
        texts = sorted(self._special.values(), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, texts))) if texts else None

    @property
    def specials(self) -> int:
        """The number of special tokens around a text."""
        return len(self.prefix) + len(self.suffix)

    def texts(
        self, texts: Sequence[str], limit: int, *, truncate: bool, param: str
    ) -> list[Encoding]:
        """Encode texts; InvalidRequest `context_length_exceeded` names the text over `limit` tokens."""
        out: list[Encoding] = []
        # Encoding without the tokens' places in the text is a fifth faster.
        for index, encoding in enumerate(self.tokenizer.encode_batch_fast(list(texts))):
            ids = encoding.ids
            if len(ids) > limit:
                if not truncate:
                    raise too_long(index, len(ids), limit, param)
                cut = len(ids) - limit
                out.append(Encoding(ids[: limit - len(self.suffix)] + self.suffix, cut))
            else:
                out.append(Encoding(ids, 0))
        return out

    def pairs(
        self, query: str, texts: Sequence[str], limit: int, *, truncate: bool
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Encode (query, text) pairs joined for a cross-encoder; returns token ids and token types."""
        ids: list[list[int]] = []
        types: list[list[int]] = []
        for index, encoding in enumerate(
            self.tokenizer.encode_batch_fast([(query, text) for text in texts])
        ):
            tokens, kinds = encoding.ids, encoding.type_ids
            if len(tokens) > limit:
                if not truncate:
                    raise too_long(index, len(tokens), limit, "documents")
                keep = limit - len(self.suffix)
                tokens = tokens[:keep] + self.suffix
                kinds = kinds[:keep] + kinds[-len(self.suffix) :] if self.suffix else kinds[:keep]
            ids.append(tokens)
            types.append(kinds)
        return ids, types

    def chunks(
        self, text: str, max_tokens: int, overlap: int, prompt: str
    ) -> list[tuple[TextPiece, list[int]]]:
        """Split a text into pieces of at most `max_tokens` tokens, prompt and special tokens included."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        head = self.prefix + (
            self.tokenizer.encode(prompt, add_special_tokens=False).ids if prompt else []
        )
        room = max_tokens - len(head) - len(self.suffix)
        if room < 1:
            raise InvalidRequest(
                f"chunking.max_tokens is {max_tokens}: the prompt and special tokens leave no room for text",
                code="invalid_chunking",
            )
        pieces = split(text, encoding.offsets, room, overlap)
        return [
            (piece, head + encoding.ids[piece.first : piece.last] + self.suffix) for piece in pieces
        ]

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        """Return the token ids of the special tokens among `texts`."""
        wanted = set(texts)
        return sorted(index for index, text in self._special.items() if text in wanted)

    def holds_special(self, texts: Iterable[str]) -> bool:
        """Return whether one of `texts` would make a special token if it were encoded like a template's text."""
        if self._marks is None:
            return False
        for text in texts:
            if self._marks.search(text):
                return True
            if self._folds and set(self.bare(text)) & self._special.keys():
                return True
        return False

    def bare(self, text: str) -> list[int]:
        """Return the token ids of a text in which special tokens count as such, with none added around the text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def shortened(self, ids: Sequence[int], most: int) -> list[int]:
        """Return a text's token ids, cut to at most `most`; the special tokens at the text's end are kept."""
        if len(ids) <= most:
            return list(ids)
        end = self.suffix if list(ids[-len(self.suffix) :]) == self.suffix else []
        return [*ids[: most - len(end)], *end]

    def beginning(self, text: str, most: int) -> str:
        """Return the beginning of a text with at most `most` tokens, not counting special tokens."""
        places = self.tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(places) <= most else text[: places[most - 1][1]]

    def written(self, text: str) -> list[int]:
        """Return the token ids of a client's text, without any special token that the text spells."""
        self.tokenizer.encode_special_tokens = True
        try:
            ids = self.bare(text)
        finally:
            self.tokenizer.encode_special_tokens = False
        # A vocabulary of words may hold a spelt special token as a word, which is dropped; the token of unknown words
        # stays.
        return [i for i in ids if i not in self._special or self._special[i] not in text]

    def located(self, text: str, *, written: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of `written`, or else of `bare`, and the characters [start, end) of each token."""
        self.tokenizer.encode_special_tokens = written
        try:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        finally:
            self.tokenizer.encode_special_tokens = False
        kept = [
            at
            for at, i in enumerate(encoding.ids)
            if not written or i not in self._special or self._special[i] not in text
        ]
        return [encoding.ids[at] for at in kept], [encoding.offsets[at] for at in kept]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def said(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens, and without incomplete characters at either end."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text.strip("\ufffd")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the characters [start, end) of each token of a text, with no special tokens added."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        places: list[tuple[int, int]] = encoding.offsets
        return places

    def check_ids(
        self, ids: Sequence[int], index: int, param: str, known: int, limit: int | None = None
    ) -> None:
        """Refuse token ids that the model does not know, and lists that are empty or longer than `limit`.

        `known` is the model's number of ids, which may be more or fewer than the tokenizer's; 0 means the tokenizer's.
        """
        if not ids:
            raise InvalidRequest(
                f"{param}[{index}] is empty: expected at least one token",
                code="empty_input",
                param=param,
            )
        if limit is not None and len(ids) > limit:
            raise too_long(index, len(ids), limit, param)
        known = known or self.vocabulary
        if min(ids) < 0 or max(ids) >= known:
            raise InvalidRequest(
                f"{param}[{index}] holds a token id outside 0..{known - 1}",
                code="invalid_token",
                param=param,
            )


def too_long(index: int, tokens: int, limit: int, param: str) -> InvalidRequest:
    """Return the error for a text with more tokens than the encoder's limit."""
    remedy = "shorten it, or send truncate=true"
    return overflow(limit, f"{param}[{index}] has {tokens} tokens", remedy, param)


@lru_cache(maxsize=16)
def load(path: str) -> TextEncoder:
    """Load a tokenizer.json once per process; ValueError for any other file."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are the workers'
    try:
        return TextEncoder(Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
    except ValueError:
        raise
    except Exception as error:  # the Rust library raises bare Exception
        raise ValueError(f"{path}: {error}; expected a tokenizer.json") from error
