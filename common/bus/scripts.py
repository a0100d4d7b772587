"""The ten scripts of the bus, its helpers, and the version of them that is in use on a Redis.

The scripts and the records they write change together, so processes with different scripts must not work side by side:
each process notes its version in Redis every few seconds, and a process of another version waits until that note has
expired.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from common.errors import CODES
from common.redis.scripts import ScriptSet, sha1

SCRIPTS = (
    "admit",
    "beat",
    "emit",
    "finish",
    "fail",
    "reclaim",
    "convict",
    "move",
    "cancel",
    "reap",
)
# Each helper changes the keys of one job, claim, registry, API key, session or shard in one step.
HELPERS = (
    *("adopt", "claim", "unclaim", "swap", "charge", "refund", "note", "index", "send", "taken"),
    *("write", "merge", "hold", "seal", "place"),
)
FILLS_LANES = ("admit", "move")
IN_USE = "bus:scripts"
IN_USE_S = 20
CODES_WRITTEN = (  # codes of the errors with which scripts themselves end jobs
    "bad_entry",
    "cancelled",
    "deadline_exceeded",
    "job_failed",
    "session_changed",
    "session_deleted",
)
_LUA = Path(__file__).parent / "lua"
_PAIRS = ", ".join(f"{code} = {CODES[code].http_status}" for code in CODES_WRITTEN)
_STATUSES = f"local STATUS = {{{_PAIRS}}}\n"


def _source(name: str) -> str:
    parts = ("lib", "lanes", name) if name in FILLS_LANES else ("lib", name)
    return _STATUSES + "".join((_LUA / f"{part}.lua").read_text() for part in parts)


class Scripts:
    """The scripts and helpers; `version` is a hash of their texts."""

    def __init__(self) -> None:
        self._set = ScriptSet({name: _source(name) for name in (*SCRIPTS, *HELPERS)})
        self.version = sha1("".join(self._set.sha.values()))[:12]

    async def run(
        self,
        call: Callable[..., Awaitable[Any]],
        name: str,
        keys: Sequence[str],
        args: Sequence[Any],
    ) -> Any:
        """Run a script or helper by its name; `call` runs one command on Redis."""
        return await self._set.run(call, name, keys, args)

    async def claim(self, call: Callable[..., Awaitable[Any]]) -> str | None:
        """Record for IN_USE_S seconds that this version is in use; if another version is, only return that one."""
        mine = self.version.encode()
        await call("SET", IN_USE, mine, "NX", "EX", IN_USE_S)
        found = await call("GET", IN_USE)
        if found not in {None, mine}:
            return str(found.decode(errors="replace"))
        await call("EXPIRE", IN_USE, IN_USE_S)
        return None
