"""Lua scripts by name, run by their SHA, and sent in full to a server that does not know them."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError


def sha1(text: str) -> str:
    """Return the name by which EVALSHA knows a script."""
    return hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - Redis prescribes SHA-1


class ScriptSet:
    """The sources of some scripts by name, and their SHAs."""

    def __init__(self, source: Mapping[str, str]) -> None:
        self.source = dict(source)
        self.sha = {name: sha1(text) for name, text in self.source.items()}

    @classmethod
    def read(cls, directory: Path, names: Iterable[str]) -> ScriptSet:
        """Return the scripts `<name>.lua` of a directory."""
        return cls({name: (directory / f"{name}.lua").read_text() for name in names})

    async def run(
        self,
        call: Callable[..., Awaitable[Any]],
        name: str,
        keys: Sequence[str],
        args: Sequence[Any],
    ) -> Any:
        """Run one script through `call`, which runs one command. KeyError if there is no such script."""
        try:
            return await call("EVALSHA", self.sha[name], len(keys), *keys, *args)
        except NoScriptError:
            return await call("EVAL", self.source[name], len(keys), *keys, *args)
