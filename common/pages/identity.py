"""Page ids, computed from a page's tokens and all before them: pages with one id hold the same keys and values."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

PAGE = 32  # tokens of one sequence in one page
PageId = bytes
Owner = bytes
_TOKENS = struct.Struct(f"<{PAGE}I")


STRIDE = 8  # pages from one mark to the next


def marks_of(ids: Sequence[PageId]) -> list[PageId]:
    """Return the marks among a chain's pages; each mark stands for itself and the pages since the mark before it."""
    return list(ids[STRIDE - 1 :: STRIDE])


def root_id(fingerprint: str, scope: str) -> PageId:
    """Return the parent of all first pages of one model and one scope (a tenant)."""
    # The fingerprint is hexadecimal, so the zero byte cannot be part of it: no two pairs collide.
    return _digest(fingerprint.encode() + b"\0" + scope.encode())


def owner_id(scope: str) -> Owner:
    """Return 8 bytes that stand for a tenant where tiers count its pages; its name cannot be read from them."""
    return hashlib.blake2b(scope.encode(), digest_size=8, person=b"spillway-owner").digest()


def page_id(parent: PageId, tokens: Sequence[int]) -> PageId:
    """Return the id of the page that follows `parent` and holds exactly PAGE `tokens`."""
    return _digest(parent + _TOKENS.pack(*tokens))


def page_ids(root: PageId, tokens: Sequence[int], known: Sequence[PageId] = ()) -> list[PageId]:
    """Return the ids of all full pages of `tokens`; `known` are the first ids, if they were computed before."""
    ids = list(known)
    for start in range(len(ids) * PAGE, len(tokens) - PAGE + 1, PAGE):
        ids.append(page_id(ids[-1] if ids else root, tokens[start : start + PAGE]))
    return ids


def _digest(data: bytes) -> PageId:
    return hashlib.blake2b(data, digest_size=16).digest()
