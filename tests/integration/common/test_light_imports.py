"""The libraries that a process of the control plane never loads, seen by importing it in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INDEXES = ("hnswlib", "faiss")
NUMERIC = ("torch", "numpy", "transformers")
EVERY_MODULE = """pkgutil, importlib, common
for module in pkgutil.walk_packages(common.__path__, "common."):
    importlib.import_module(module.name)
"""
PROCESSES = {
    "common": (EVERY_MODULE, (*NUMERIC, *INDEXES, "tokenizers")),
    "router": (
        "services.router.service, services.router.__main__, services.router.text.collections",
        (*NUMERIC, *INDEXES),
    ),
    "kv_store": ("services.kv_store.service", (*NUMERIC, *INDEXES, "tokenizers")),
    "vector_search": ("services.vector_search.service", ("torch", "faiss", "transformers")),
    "cli": (
        "cli.main, models.demo.world.handbook, models.demo.world.tasks",
        (*NUMERIC, *INDEXES, "tokenizers"),
    ),
}


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_loads_nothing_heavy(process: str) -> None:
    """Importing the modules of the process leaves the heavy libraries unloaded."""
    modules, heavy = PROCESSES[process]
    code = f"import sys, {modules}\nprint(sorted({set(heavy)!r} & set(sys.modules)))"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert (done.stdout.strip(), done.stderr, done.returncode) == ("[]", "", 0)
