"""The code that each row measures: a row is stale once one of these files is not what was measured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import ROOT

_BUS = ("common/bus", "common/redis", "common/wire")
_MESH = (*_BUS, "common/worker", "services/router")
_ENCODER = ("engine/encoder", "engine/models/encoders", "engine/kernels/encoder.cpp")
_EMBED = (*_ENCODER, "engine/device.py", "services/adapters/encode", *_MESH)
_DECODER = ("engine/decoder", "engine/models/decoders", "engine/kernels/decoder")
_CHAT = (*_DECODER, "engine/device.py", "services/adapters/generate", *_MESH)
_PAGES = ("common/pages", "services/kv_store")
_SEARCH = ("services/vector_search", "common/transport")
_COST = ("common/cost",)
_ALL = (*_CHAT, *_EMBED, *_PAGES, *_SEARCH)

PATHS: dict[str, tuple[str, ...]] = {
    "E1": _EMBED, "E2": _EMBED, "R1": _MESH, "R2": _BUS, "V1": (*_SEARCH, *_MESH), "V1W": (*_SEARCH, *_MESH), "V2": _SEARCH,
    "F1": (*_EMBED, *_SEARCH), "F2": _EMBED, "F3": (*_EMBED, *_DECODER, *_SEARCH), "F4": _EMBED,
    "F5": _ALL, "F5P": (*_CHAT, *_PAGES),
    "C1": _CHAT, "R1C": _CHAT, "F1C": _CHAT, "F1A": _ALL, "F1P": (*_CHAT, *_PAGES), "F2C": _CHAT, "F4C": _CHAT,
    "Q1": (*_CHAT, *_SEARCH), "X1": _DECODER, "L1": _DECODER, "L2": _DECODER, "L3": _DECODER,
    "L4": ("engine/kernels/decoder",), "L5": _DECODER, "K1": ("engine/kernels/decoder",),
    "N2": (*_DECODER, *_COST), "H1": _CHAT, "H2": _ALL, "T1": _CHAT, "P1": (*_CHAT, *_PAGES),
    "P2": (*_CHAT, *_PAGES),
    "P3": (*_CHAT, *_PAGES), "P4": (*_DECODER, *_PAGES), "P5": ("engine/decoder/kv",), "X2": _DECODER,
    "W1": (*_COST, *_EMBED),
    "W2": (*_COST, *_EMBED), "W3": (*_COST, *_EMBED), "F6": ("services/router",),
}  # fmt: skip
_CODE = {".py", ".h", ".cpp", ".lua"}


def hot_path(row: str) -> dict[str, Any]:
    """Return the paths of a row and the digest of their code now, as a document keeps them."""
    paths = sorted(set(PATHS[row]))
    return {"paths": paths, "digest": digest(paths)}


def digest(paths: Iterable[str], root: Path = ROOT) -> str:
    """Return a digest of the names and contents of all code files under these paths, sorted."""
    found = hashlib.blake2b(digest_size=16)
    for path in paths:
        place = root / path
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        for file in files:
            if file.suffix in _CODE:
                found.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()


def stale(document: Mapping[str, Any], root: Path = ROOT) -> bool:
    """True if the code that a document measured has changed since, or if the document does not name the code."""
    kept = document.get("hot_path")
    return kept is None or digest(kept["paths"], root) != kept["digest"]
