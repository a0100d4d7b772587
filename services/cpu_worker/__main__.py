"""Start one cpu_worker: parse, choose its cores, build, run."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Literal

import msgspec

from common import log
from common.config import WorkerConfig
from common.devices import detect, show_cores, torch_version, within_reach
from common.lifecycle import run_service
from common.placement import place, place_host
from services.adapters.metrics import WorkMetrics
from services.adapters.worker import serve
from services.cpu_worker.host_role import help_host

SERVICE = "cpu_worker"


def placed(config: WorkerConfig) -> WorkerConfig:
    """Bind this thread, and those that it starts, to their cores; return the config to compute with there.

    Called before torch is loaded, since torch counts the cores then.
    """
    machine = within_reach(detect(), device=config.device, env=os.environ, torch=torch_version())
    cores, threads = place(machine, threads=config.threads, cores=config.cores)
    if cores:
        os.sched_setaffinity(0, cores)
    log.get(SERVICE).info("cores_chosen", cores=show_cores(cores) or "any", threads=threads)
    # Where torch sees an accelerator, "auto" would take it; this lane is what does not fit there.
    device: Literal["sim", "cpu"] = "sim" if config.device == "sim" else "cpu"
    return msgspec.structs.replace(config, threads=threads, device=device)


def placed_beside(config: WorkerConfig) -> WorkerConfig:
    """Bind this process to the cores for attention on the host; return the config to compute with there."""
    cores, threads = place_host(detect(), config.host_cores)
    if cores:
        os.sched_setaffinity(0, cores)
    return msgspec.structs.replace(config, threads=threads)


async def work(config: WorkerConfig, instance: str, stopping: asyncio.Event) -> None:
    """Serve the CPU's lane, or attend for a gpu_worker, on the cores that are chosen for it."""
    if config.role == "host":
        await help_host(placed_beside(config), f"{SERVICE}_host", instance, stopping)
        return
    await serve(
        placed(config), instance, stopping, service=SERVICE, lane="cpu", metrics=WorkMetrics()
    )


def main() -> int:
    """Run the worker; returns the process' exit status."""
    return run_service(WorkerConfig, SERVICE, work)


if __name__ == "__main__":
    sys.exit(main())
