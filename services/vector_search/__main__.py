"""Start one vector_search: parse, build, run."""

from __future__ import annotations

import asyncio
import os
import sys

from common import log, tracing
from common.arguments import parse
from common.config import SearchConfig
from common.lifecycle import run

SERVICE = "vector_search"


def main() -> int:
    """Run the service; returns the process' exit status."""
    config, instance = parse(
        SearchConfig, sys.argv[1:], os.environ, f"python -m services.{SERVICE}"
    )
    log.setup(SERVICE, config)
    tracing.setup(SERVICE, os.environ)
    # Read by numpy when it loads: queries are spread over threads, so each product uses one.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from services.vector_search.service import serve  # noqa: PLC0415

    async def work(stopping: asyncio.Event) -> None:
        await serve(config, instance, stopping)

    return run(work, config.drain_s)


if __name__ == "__main__":
    sys.exit(main())
