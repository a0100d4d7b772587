"""The life of a service's process: starts the event loop, obeys signals, drains, and returns an exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from common import log, tracing
from common.arguments import parse
from common.config import Common
from common.errors import ConfigError
from common.tasks import stop_or_end

# Seconds that a service may need after its drain time to close connections and files.
_CLOSE_S = 10.0
Main = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
C = TypeVar("C", bound=Common)


def run_service(
    cls: type[C],
    service: str,
    serve: Callable[[C, str, asyncio.Event], Coroutine[Any, Any, None]],
    prog: str | None = None,
) -> int:
    """Run a service with the configuration that its flags, environment and file give; return the exit status.

    `serve(config, instance, stopping)` is the service, run like the `main` of `run`; `prog` is its name in messages.
    """
    config, instance = parse(cls, sys.argv[1:], os.environ, prog or f"python -m services.{service}")
    log.setup(service, config)
    tracing.setup(service, os.environ)
    return run(lambda stopping: serve(config, instance, stopping), config.drain_s)


def run(main: Main, drain_s: float) -> int:
    """Run `main(stopping)` to its end and return the process' exit status.

    SIGTERM and SIGINT set `stopping`; `main` then drains within `drain_s` seconds and returns. A second signal
    ends the process at once (128 + signal). 0 = done, 1 = an unexpected error (logged) or a drain that took too
    long, 2 = a configuration that cannot be used (one sentence on stderr).
    """
    logger = log.get("lifecycle")
    os.umask(
        0o077
    )  # documents, indexes and notes are for this user only, wherever the data directory lies
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_supervised(main, drain_s))
    except ConfigError as error:
        sys.stderr.write(f"spillway: {log.mask(str(error))}\n")
        return 2
    except Exception:
        logger.exception("service_failed")
        return 1
    finally:
        tracing.stop()


async def _supervised(main: Main, drain_s: float) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stopping)
    work = asyncio.create_task(main(stopping), name="main")
    await stop_or_end(stopping, work)
    if not work.done():
        await asyncio.wait({work}, timeout=drain_s + _CLOSE_S)
    if not work.done():
        log.get("lifecycle").error("drain_overran", drain_s=drain_s)
        work.cancel()
        await asyncio.wait({work}, timeout=_CLOSE_S)
        return 1
    work.result()
    return 0


def _on_signal(number: int, stopping: asyncio.Event) -> None:
    logger = log.get("lifecycle")
    if stopping.is_set():
        logger.warning("stopped_at_once", signal=signal.Signals(number).name)
        sys.stderr.flush()
        os._exit(128 + number)
    logger.info("stop_requested", signal=signal.Signals(number).name)
    stopping.set()
