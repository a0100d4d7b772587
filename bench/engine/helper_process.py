"""Helper processes for attention on the host, as an operator starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import ROOT

_LIMIT_S = 60.0


@contextmanager
def helper_process(socket: Path, data_dir: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a `cpu_worker --role host`."""
    made = subprocess.Popen(
        [
            sys.executable, "-m", "services.cpu_worker", "--role", "host", "--host-socket", str(socket),
            "--data-dir", str(data_dir), *flags,
        ],
        cwd=ROOT, env={**os.environ, "SPILLWAY_LOG_FORMAT": "json"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.kill()
        made.wait()


def wait_until(holds: Callable[[], object]) -> None:
    """Return once a condition holds of which nobody tells; TimeoutError after a minute."""
    end = time.monotonic() + _LIMIT_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)
