"""Start one kv_store: parse, build, run."""

from __future__ import annotations

import asyncio
import os
import sys

from common import log, tracing
from common.arguments import parse
from common.config import StoreConfig
from common.lifecycle import run

SERVICE = "kv_store"


def main() -> int:
    """Run the service; returns the process' exit status."""
    config, instance = parse(StoreConfig, sys.argv[1:], os.environ, f"python -m services.{SERVICE}")
    log.setup(SERVICE, config)
    tracing.setup(SERVICE, os.environ)
    from services.kv_store.service import serve  # noqa: PLC0415 - after logging is set up

    async def work(stopping: asyncio.Event) -> None:
        await serve(config, instance, stopping)

    return run(work, config.drain_s)


if __name__ == "__main__":
    sys.exit(main())
