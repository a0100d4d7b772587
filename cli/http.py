"""Calls to the server: the choice of address and key, and sentences for failures."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway_client import AsyncSpillway, Spillway, SpillwayError
from spillway_client.errors import APIConnectionError, APITimeoutError, AuthenticationError

from cli.instance import running_url
from common.config import Common, load
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address and the API key for it."""

    url: str
    api_key: str | None


class NoServer(Exception):
    """No address was given and no instance runs in the data directory; the message says what to do."""


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add --url and --data-dir; the key is SPILLWAY_API_KEY only, since `ps` shows arguments."""
    parser.add_argument(
        "--url", help="the server (default: SPILLWAY_URL, else the instance of the data directory)"
    )
    parser.add_argument(
        "--data-dir", default=argparse.SUPPRESS, help="where to look for a running instance"
    )


def endpoint(args: argparse.Namespace, env: Mapping[str, str]) -> Endpoint:
    """Return the server to call; NoServer or ConfigError if none is found."""
    key = env.get("SPILLWAY_API_KEY") or None
    url = args.url or env.get("SPILLWAY_URL")
    if url:
        return Endpoint(url, key)
    given = getattr(args, "data_dir", None)
    config = getattr(args, "config", None)
    data_dir = load(Common, env, file=config, args={"data_dir": given}).data_dir
    return Endpoint(running_url(data_dir) or _lone_router(Path(data_dir)), key)


def _lone_router(data_dir: Path) -> str:
    """Return the address of a router that runs without a supervisor."""
    for path in sorted((data_dir / "run").glob("router-*.json")):
        try:
            note = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            os.kill(int(note["pid"]), 0)
            port = int(note["port"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # the router is gone, or the note is damaged
        if port:
            return f"http://127.0.0.1:{port}"
    raise NoServer(
        f"no instance is running in {data_dir}; start one with `spillway up`, or name a server with --url"
        " or SPILLWAY_URL"
    )


def talk(
    args: argparse.Namespace,
    work: Callable[[AsyncSpillway], Coroutine[Any, Any, int]],
    **options: Any,
) -> int:
    """Run `work` with a client; every failure becomes one sentence on stderr and exit status 1, 2 or 130."""

    async def main() -> int:
        where = endpoint(args, os.environ)
        async with AsyncSpillway(where.url, where.api_key, **options) as client:
            return await work(client)

    return exit_status(lambda: asyncio.run(main()))


def talk_blocking(args: argparse.Namespace, work: Callable[[Spillway], int], **options: Any) -> int:
    """Run `work` with a blocking client; failures as of `talk`."""

    def main() -> int:
        where = endpoint(args, os.environ)
        with Spillway(where.url, where.api_key, **options) as client:
            return work(client)

    return exit_status(main)


def exit_status(work: Callable[[], int]) -> int:
    """Run `work`; every failure becomes one sentence on stderr and exit status 1, 2 or 130."""
    try:
        return work()
    except (NoServer, ConfigError) as error:
        return say(str(error), 2)
    except SpillwayError as error:
        return say(sentence(error), 1)
    except KeyboardInterrupt:
        return say("stopped", 130)


def sentence(error: SpillwayError) -> str:
    """Return a failed call's error as a sentence for people."""
    if isinstance(error, AuthenticationError):
        return f"{error.message}; give a key with SPILLWAY_API_KEY (`spillway keys create`)"
    if isinstance(error, APITimeoutError):
        return f"the server did not answer in time: {error}"
    if isinstance(error, APIConnectionError):
        return f"cannot reach the server: {error}"
    return str(error)


def say(sentence: str, status: int) -> int:
    """Print one sentence on stderr and return `status`."""
    print(f"spillway: {sentence}", file=sys.stderr)
    return status
