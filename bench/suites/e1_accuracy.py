"""E1's accuracy: the cosine of every text's vector to our own in fp32, on real texts."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import lru_cache
from typing import Any

import numpy as np

from engine.models.encoders.encoder import Encoder

LOWEST, MEDIAN = 0.9995, 0.9999
# Modules whose import does nothing but define.
_PLAIN = frozenset({
    "argparse", "ast", "asyncio", "calendar", "collections", "concurrent", "contextlib", "csv", "datetime",
    "decimal", "difflib", "email", "fractions", "functools", "heapq", "html", "inspect", "ipaddress", "json",
    "logging", "mailbox", "pathlib", "pickle", "random", "re", "shutil", "socket", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "typing", "unittest", "urllib", "uuid",
    "weakref", "xml", "zipfile",
})  # fmt: skip


class OurEncoder:
    """Our tokenizer and encoder, as router and worker use them."""

    def __init__(self, dtype: str = "auto") -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - rivals and models load only when asked for

        self.encoder = Encoder.load("", device="cpu", dtype=dtype)
        self._tokenizer = Tokenizer.from_str(self.encoder.tokenizer_json().decode())

    def __call__(self, texts: list[str]) -> Any:
        """Return one row per text."""
        limit = self.encoder.max_tokens
        encoded = self._tokenizer.encode_batch(texts)
        return self.encoder.encode([_cut(item.ids, limit) for item in encoded])


def _cut(ids: list[int], limit: int) -> list[int]:
    return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


def real_texts(count: int) -> list[str]:
    """Return docstrings of the standard library, the same at every run of one Python."""
    found: list[str] = []
    for module in pkgutil.iter_modules():
        if len(found) >= count or module.name not in _PLAIN:
            continue
        loaded = importlib.import_module(module.name)
        docs = (inspect.getdoc(value) for _, value in sorted(vars(loaded).items()))
        found += [text for text in docs if text and 20 < len(text) < 2000]
    return list(dict.fromkeys(found))[:count]


@lru_cache(maxsize=4)
def _exact(texts: tuple[str, ...]) -> Any:
    return OurEncoder("fp32")(list(texts))


def cosines(rows: Any, texts: list[str]) -> list[float]:
    """Return the cosine of each text's row to ours in fp32."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found: list[float] = (unit * _exact(tuple(texts))).sum(axis=1).tolist()
    return found


def within_bound(found: list[float]) -> bool:
    """True if every text, and the median, is as near to fp32 as the target asks."""
    return min(found) >= LOWEST and float(np.median(found)) >= MEDIAN
