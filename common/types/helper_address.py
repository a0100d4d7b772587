"""The address at which a gpu_worker meets its helper for attention: a Unix socket, or TCP to another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from common.errors import ConfigError

ChannelKind = Literal["unix", "tcp"]
_SCHEME = "tcp://"
_LEAST_SECRET = 16


class HelperAddress(NamedTuple):
    """The `path` of a Unix socket; or, without one, `host` and `port` of TCP, and the `secret` that both sides know."""

    path: str = ""
    host: str = ""
    port: int = 0
    secret: str = ""

    @property
    def kind(self) -> ChannelKind:
        """The kind of channel between the two processes."""
        return "unix" if self.path else "tcp"

    def __repr__(self) -> str:
        return f"HelperAddress({self})"  # without the secret

    def __str__(self) -> str:
        if self.path:
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_SCHEME}{host}:{self.port}"

    @classmethod
    def of(cls, data_dir: str, setting: str, secret: str) -> HelperAddress | None:
        """Return the address in `SPILLWAY_HOST_SOCKET`; None if it is empty, ConfigError if it is unusable."""
        if not setting:
            return None
        if not setting.startswith(_SCHEME):
            return cls(str(Path(data_dir) / setting))
        host, port = _split(setting)
        if len(secret) < _LEAST_SECRET:
            raise ConfigError(
                f"SPILLWAY_HOST_SOCKET is {setting!r} and SPILLWAY_HOST_SECRET has {len(secret)} "
                f"characters; expected one secret of at least {_LEAST_SECRET} for the gpu_worker and its helper"
            )
        return cls("", host, port, secret)


def channel_kind(setting: str) -> ChannelKind:
    """Return the kind of channel that `SPILLWAY_HOST_SOCKET` names."""
    return "tcp" if setting.startswith(_SCHEME) else "unix"


def _split(setting: str) -> tuple[str, int]:
    try:
        parts = urlsplit(setting)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or setting.count("/") != 2 or "@" in setting or "?" in setting:
        raise ConfigError(
            f"SPILLWAY_HOST_SOCKET is {setting!r}: expected tcp://HOST:PORT, or the path of a Unix socket"
        )
    return host, port
