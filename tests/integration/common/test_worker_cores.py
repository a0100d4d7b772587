"""A cpu_worker binds its process to the cores that it is placed on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WORKER = """
import os, sys
from common import devices
from common.config import WorkerConfig
from services.cpu_worker import __main__ as worker

mine = tuple(sorted(os.sched_getaffinity(0)))
node = (devices.NumaNode(0, mine),)
gpu = (devices.Accelerator("nvidia", "GPU", "/dev/nvidia0", 0),)
found = devices.Machine(mine, tuple((core,) for core in mine), node, accelerators=gpu)
worker.detect, worker.torch_version = (lambda: found), (lambda: "2.13.0")
os.environ.pop("CUDA_VISIBLE_DEVICES", None)

for device in ("sim", "cpu", "auto"):
    config = worker.placed(WorkerConfig(device=device))
    pinned = os.sched_getaffinity(0) != set(mine)
    assert pinned == (device == "auto" and len(mine) > 1), (device, mine)
    assert config.device == ("sim" if device == "sim" else "cpu")
assert max(os.sched_getaffinity(0)) == mine[-1]
assert config.threads == len(os.sched_getaffinity(0))
worker.placed(WorkerConfig(cores=str(mine[0]), threads=3))
assert os.sched_getaffinity(0) == {mine[0]}
assert "torch" not in sys.modules
"""


def test_the_worker_goes_where_it_is_placed() -> None:
    """A cpu_worker binds itself before torch is loaded, beside an accelerator or where it is told, and nowhere else."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
