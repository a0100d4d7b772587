"""Page ids, computed from a page's tokens and all earlier tokens: pages with the same id hold the same keys and values.

Some models rotate the keys of a text by other angles if the text is longer than their short context (LongRoPE). Such
texts have pages of their own, since their first page has another parent. The short context is part of the model's
fingerprint, so that the ids follow from the fingerprint and the tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

PAGE = 32  # tokens of one sequence in one page
CHUNK = 8  # pages that attention on a CPU takes as one, counted from a sequence's first page
PageId = bytes
Owner = bytes
_TOKENS = struct.Struct(f"<{PAGE}I")


STRIDE = 8  # the number of pages between marks


def marks_of(ids: Sequence[PageId]) -> list[PageId]:
    """Return the marks among a chain's pages; each mark represents itself and the pages since the previous mark."""
    return list(ids[STRIDE - 1 :: STRIDE])


def root_id(fingerprint: str, scope: str) -> PageId:
    """Return the parent id of all first pages of one model in one scope (a tenant)."""
    # The fingerprint has only hexadecimal digits (and a short context), so the zero byte keeps all pairs distinct.
    return _digest(fingerprint.encode() + b"\0" + scope.encode())


def long_root(root: PageId) -> PageId:
    """Return the parent id of first pages of texts that are longer than the model's short context."""
    return _digest(root + b"long")


def with_short_context(digest: str, tokens: int) -> str:
    """Return a fingerprint with the model's short context appended, in tokens; 0: the model has none."""
    return f"{digest}-{tokens}" if tokens else digest


def short_context(fingerprint: str) -> int:
    """Return the short context in a fingerprint, in tokens; 0 if the model has none."""
    _, _, tokens = fingerprint.partition("-")
    return int(tokens) if tokens.isascii() and tokens.isdigit() else 0


def text_pages(fingerprint: str, scope: str, tokens: Sequence[int]) -> list[PageId]:
    """Return the ids of all full pages of a text."""
    root, short = root_id(fingerprint, scope), short_context(fingerprint)
    return page_ids(long_root(root) if 0 < short < len(tokens) else root, tokens)


def owner_id(scope: str) -> Owner:
    """Return 8 bytes that represent a tenant in the tiers' counts, without revealing its name."""
    return hashlib.blake2b(scope.encode(), digest_size=8, person=b"spillway-owner").digest()


def page_id(parent: PageId, tokens: Sequence[int]) -> PageId:
    """Return the id of the page that follows `parent` and holds exactly PAGE `tokens`."""
    return _digest(parent + _TOKENS.pack(*tokens))


def page_ids(root: PageId, tokens: Sequence[int], known: Sequence[PageId] = ()) -> list[PageId]:
    """Return the ids of all full pages of `tokens`; `known` are first ids that were computed earlier."""
    ids = list(known)
    for start in range(len(ids) * PAGE, len(tokens) - PAGE + 1, PAGE):
        ids.append(page_id(ids[-1] if ids else root, tokens[start : start + PAGE]))
    return ids


def _digest(data: bytes) -> PageId:
    return hashlib.blake2b(data, digest_size=16).digest()
