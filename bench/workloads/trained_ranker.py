"""The cross-encoder that `scripts/train_reranker.py` trains, where it has been trained on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from bench import ROOT

NAME = "trained-ranker"
VARIABLE = "SPILLWAY_BENCH_RERANKER"
DEFAULT = ROOT / ".bench-env" / NAME
HINT = (
    f"run `python scripts/train_reranker.py`, or set {VARIABLE} to the directory of a cross-encoder"
)


def readable() -> Path | None:
    """Return the directory of the cross-encoder that VARIABLE names, or the script's own; None where there is none."""
    named = Path(os.environ.get(VARIABLE) or DEFAULT)
    return named if (named / "config.json").is_file() else None
