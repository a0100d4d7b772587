"""Start one cpu_worker: parse, build, run."""

from __future__ import annotations

import asyncio
import os
import sys

from common import log, tracing
from common.arguments import parse
from common.config import WorkerConfig
from common.lifecycle import run
from common.work.metrics import WorkMetrics
from common.work.service import serve

SERVICE = "cpu_worker"


def main() -> int:
    """Run the worker; returns the process' exit status."""
    config, instance = parse(
        WorkerConfig, sys.argv[1:], os.environ, f"python -m services.{SERVICE}"
    )
    log.setup(SERVICE, config)
    tracing.setup(SERVICE, os.environ)
    metrics = WorkMetrics()

    async def work(stopping: asyncio.Event) -> None:
        await serve(config, instance, stopping, service=SERVICE, lane="cpu", metrics=metrics)

    return run(work, config.drain_s)


if __name__ == "__main__":
    sys.exit(main())
