"""Access of commands to the bus itself, without the router: such commands need access to the machine, not a key."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable

import msgspec

from cli.instance import Instance
from common.bus import Bus
from common.clock import SystemClock
from common.config import Common, load

_CONNECT_S = 5.0


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add --data-dir and --config; SPILLWAY_REDIS_URL names any other server."""
    parser.add_argument("--data-dir", help="which instance (default .spillway)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with SPILLWAY_* names")


def with_bus(args: argparse.Namespace, work: Callable[[Bus], Awaitable[int]]) -> int:
    """Run `work` with a bus on the instance's server; SpillwayError if it cannot be reached."""
    config = load(Common, os.environ, file=args.config, args={"data_dir": args.data_dir})
    if not config.redis_url:
        url = Instance.at(config.data_dir).redis_url
        config = msgspec.structs.replace(config, redis_url=url)

    async def main() -> int:
        bus = await Bus.open(config, SystemClock(), timeout_s=_CONNECT_S)
        try:
            return await work(bus)
        finally:
            await bus.close()

    return asyncio.run(main())
