"""Start one gpu_worker: parse, build, run."""

from __future__ import annotations

import asyncio
import os
import sys

from common import log, tracing
from common.arguments import parse
from common.config import WorkerConfig
from common.lifecycle import run
from services.adapters.generate.generator import Generator
from services.adapters.generate.metrics import LANE
from services.adapters.metrics import WorkMetrics
from services.adapters.worker import serve

SERVICE = "gpu_worker"


def main() -> int:
    """Run the worker; returns the process' exit status."""
    config, instance = parse(
        WorkerConfig, sys.argv[1:], os.environ, f"python -m services.{SERVICE}"
    )
    log.setup(SERVICE, config)
    tracing.setup(SERVICE, os.environ)
    metrics = WorkMetrics()

    async def work(stopping: asyncio.Event) -> None:
        await serve(
            config,
            instance,
            stopping,
            service=SERVICE,
            lane=LANE,
            metrics=metrics,
            beside=Generator.of(config, SERVICE, metrics),
        )

    return run(work, config.drain_s)


if __name__ == "__main__":
    sys.exit(main())
