"""Replies of Redis as Python values."""

from __future__ import annotations


def hash_of(reply: list[bytes]) -> dict[bytes, bytes]:
    """Return a flat reply of fields and values as a dict."""
    return dict(zip(reply[::2], reply[1::2], strict=True))
