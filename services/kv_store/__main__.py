"""The entry point of a kv_store process: reads the configuration, builds the service and runs it."""

from __future__ import annotations

import asyncio
import sys

from common.config import StoreConfig
from common.lifecycle import run_service


async def work(config: StoreConfig, instance: str, stopping: asyncio.Event) -> None:
    """Serve the sessions and keep their pages."""
    from services.kv_store.service import serve  # noqa: PLC0415 - after logging is set up

    await serve(config, instance, stopping)


def main() -> int:
    """Run the service; return the process' exit status."""
    return run_service(StoreConfig, "kv_store", work)


if __name__ == "__main__":
    sys.exit(main())
