"""Helper processes for attention on the host, as an operator starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import ROOT
from common.types.helper_address import ChannelKind, HelperAddress

_LIMIT_S = 60.0
_SECRET = "known to both sides alone"  # noqa: S105 - of measurements and tests


def local_address(kind: ChannelKind, folder: Path) -> HelperAddress:
    """Return an address on this machine: a socket in a folder, or a port that is free."""
    if kind == "unix":
        return HelperAddress(str(folder / "host.sock"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        return HelperAddress("", "127.0.0.1", free.getsockname()[1], _SECRET)


@contextmanager
def helper_process(
    address: HelperAddress, data_dir: Path, *flags: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a `cpu_worker --role host` for the gpu_worker at an address."""
    # Variables of the bench, and of a mesh around it, are not the helper's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPILLWAY_")}
    made = subprocess.Popen(
        [
            sys.executable, "-m", "services.cpu_worker", "--role", "host", "--host-socket", str(address),
            "--data-dir", str(data_dir), *flags,
        ],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**env, "SPILLWAY_LOG_FORMAT": "json", "SPILLWAY_HOST_SECRET": address.secret},
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
