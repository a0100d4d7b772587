"""Start one gpu_worker: parse, build, run."""

from __future__ import annotations

import asyncio
import sys

from common.config import WorkerConfig
from common.lifecycle import run_service
from services.adapters.generate.generator import Generator
from services.adapters.generate.metrics import LANE
from services.adapters.metrics import WorkMetrics
from services.adapters.worker import serve

SERVICE = "gpu_worker"


async def work(config: WorkerConfig, instance: str, stopping: asyncio.Event) -> None:
    """Serve the accelerator's lane, with the encoders and the generator that the config names."""
    metrics = WorkMetrics()
    await serve(
        config,
        instance,
        stopping,
        service=SERVICE,
        lane=LANE,
        metrics=metrics,
        beside=Generator.of(config, SERVICE, metrics),
    )


def main() -> int:
    """Run the worker; returns the process' exit status."""
    return run_service(WorkerConfig, SERVICE, work)


if __name__ == "__main__":
    sys.exit(main())
