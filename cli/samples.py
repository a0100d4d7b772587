"""`spillway samples`: put the sample collections into a running instance, for the tenant of the key."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from cli import sample
from cli.http import add_server, endpoint, exit_status, say
from common.config import Common, load

HELP = "load the sample collections `handbook` and `docs`"


def add(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("samples", help=HELP, description=HELP)
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Load the missing documents; 1 if the server stays away or refuses."""

    def work() -> int:
        where = endpoint(args, os.environ)
        given = {"data_dir": getattr(args, "data_dir", None)}
        place = Path(load(Common, os.environ, args=given).data_dir)
        asyncio.run(sample.load(where.url, print, api_key=where.api_key, data_dir=place))
        return 0

    try:
        return exit_status(work)
    except sample.Stop as error:
        return say(str(error), 1)
