"""The file in which a shard remembers the plan that its index keeps to."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from common import log
from services.vector_search.index.followed_plan import PlanState
from services.vector_search.write_log import sync_path

_log = log.get("vector_search")


class PlanFile:
    """One shard's plan on the disk; a damaged file counts as none, since the registry knows the plan too.

    Any thread may keep one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = PlanState()
        self._keeping = threading.Lock()

    def read(self) -> PlanState:
        """Return what was kept last."""
        try:
            self._kept = msgspec.json.decode(self._path.read_bytes(), type=PlanState)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("plan_not_read", path=str(self._path), why=str(error))
        return self._kept

    def keep(self, state: PlanState) -> None:
        """Keep a state, durably, if it is another one; OSError leaves the one before."""
        with self._keeping:
            if state == self._kept:
                return
            new = self._path.with_name(self._path.name + ".new")  # snapshots remove *.tmp
            new.write_bytes(msgspec.json.encode(state))
            sync_path(new)
            new.replace(self._path)
            sync_path(self._path.parent)
            self._kept = state
