"""Runs a service of which one function raises as soon as a file exists.

`python -m tests.integration.supervision.sabotage <module>:<function> <file> <service> <flags>..`
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any


class SabotageError(RuntimeError):
    """What the function raises."""


def _break(target: str, trigger: Path) -> None:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def check() -> None:
        if trigger.exists():
            raise SabotageError(target)

    async def broken(*args: Any) -> Any:
        work = asyncio.ensure_future(original(*args))
        try:
            while not work.done():
                check()
                await asyncio.wait({work}, timeout=0.02)
            return work.result()
        finally:
            work.cancel()

    def broken_at_once(*args: Any) -> Any:
        check()
        return original(*args)

    is_async = inspect.iscoroutinefunction(original)
    setattr(owner, name, broken if is_async else broken_at_once)


if __name__ == "__main__":
    _break(sys.argv[1], Path(sys.argv[2]))
    sys.argv = sys.argv[3:]
    runpy.run_module(f"services.{sys.argv[0]}", run_name="__main__", alter_sys=True)
