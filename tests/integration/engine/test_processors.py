"""Threads of a step of the compiled kernels keep to processors of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.models.decoders.compiled_decoder import load_kernels

ROOT = Path(__file__).parents[3]
STEP = """
import os, sys
from bench.engine.decoder_process import LoadedGenerator

allowed = os.sched_getaffinity(0)
generator = LoadedGenerator("models/demo", "bf16", int(sys.argv[1]))
bound = []
for _ in range(2):
    generator.prefill(40)
    threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    bound = sorted(min(kept) for kept in threads if len(kept) == 1)
    assert len(set(bound)) == len(bound) and set(bound) < allowed, (bound, allowed)
assert os.sched_getaffinity(0) == allowed
print(len(bound))
"""
CORES = len(os.sched_getaffinity(0))


@pytest.mark.skipif(CORES < 2, reason="a second processor is needed")
@pytest.mark.skipif(load_kernels() is None, reason="no compiler for the kernels")
@pytest.mark.parametrize(("threads", "bound"), [(CORES, CORES - 1), (CORES - 1, 0)])
def test_threads_have_processors_of_their_own(threads: int, bound: int) -> None:
    """Helpers of a step on all processors keep to one each, other threads and the caller between steps to none."""
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(threads)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(bound)
