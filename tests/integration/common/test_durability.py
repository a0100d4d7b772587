"""Durability is checked at start, on the real servers."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError
from common.redis import durability
from tests.support.servers import Server, every_server


def _caller(server: Server) -> Any:
    async def call(*words: Any) -> Any:
        return server.command(*words)

    return call


@every_server
async def test_the_embedded_settings_keep_process(redis_server: Server) -> None:
    """What the embedded server runs with is durable against kill -9, and not against power loss."""
    call = _caller(redis_server)

    await durability.check(call, "process")
    with pytest.raises(ConfigError, match="appendfsync is no, so power loss loses work"):
        await durability.check(call, "machine")
    redis_server.config_set("appendfsync", "always")
    await durability.check(call, "machine")


@every_server
async def test_broken_promises_are_named(redis_server: Server) -> None:
    """Every setting that breaks the promise is in the sentence."""
    redis_server.config_set("appendonly", "no")
    redis_server.config_set("maxmemory-policy", "allkeys-lru")
    redis_server.config_set("appendfsync", "everysec")

    with pytest.raises(ConfigError) as error:
        await durability.check(_caller(redis_server), "process")

    assert "appendonly is no" in str(error.value)
    assert "appendfsync is everysec" in str(error.value)
    assert "maxmemory-policy is allkeys-lru" in str(error.value)


async def test_replicated_needs_replicas(redis_server: Server) -> None:
    """`replicated` asks for a replica that must have what was written."""
    with pytest.raises(ConfigError, match="min-replicas-to-write is 0"):
        await durability.check(_caller(redis_server), "replicated")


async def test_a_server_that_does_not_tell_is_trusted(redis_server: Server) -> None:
    """Managed servers forbid CONFIG: nothing can be checked, nothing is refused."""

    async def call(*_words: Any) -> Any:
        raise RuntimeError("ERR unknown command 'CONFIG'")

    await durability.check(call, "machine")
