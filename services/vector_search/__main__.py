"""Start one vector_search: parse, build, run."""

from __future__ import annotations

import asyncio
import os
import sys

from common.config import SearchConfig
from common.lifecycle import run_service


async def work(config: SearchConfig, instance: str, stopping: asyncio.Event) -> None:
    """Serve the collections."""
    # Read by numpy when it loads: queries are spread over threads, so each product uses one.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from services.vector_search.service import serve  # noqa: PLC0415

    await serve(config, instance, stopping)


def main() -> int:
    """Run the service; returns the process' exit status."""
    return run_service(SearchConfig, "vector_search", work)


if __name__ == "__main__":
    sys.exit(main())
