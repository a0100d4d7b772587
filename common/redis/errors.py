"""Meaning of redis-py's errors: the server is away, the server is full, or the server refuses this one command.

The table holds for every server, every version and a Cluster.
"""

from __future__ import annotations

import asyncio

from redis.exceptions import (
    BusyLoadingError,
    ClusterError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

_AWAY = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ClusterError,  # the Cluster is down, or has redirected the command too often
    RedisClusterException,
    TryAgainError,
    ReadOnlyError,
    OSError,
    asyncio.TimeoutError,
)
_AWAY_REPLIES = (
    "NOREPLICAS",
    "MISCONF",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "MASTERDOWN",
    "LOADING",
    "READONLY",
    "UNBLOCKED",
)


class RedisAway(Exception):
    """The server cannot be reached or takes no commands now; the same command may succeed later."""


class RedisClosed(RedisAway):
    """The client was closed by its own process, so the command will not succeed later."""


def is_away(error: Exception, *, cluster: bool) -> bool:
    """Return whether the server, or the part of a Cluster that was asked, takes no commands now."""
    if isinstance(error, _AWAY):
        return True
    if cluster and isinstance(error, AttributeError):
        return True  # redis-py's error for a connection that closes while it opens
    text = str(error)  # a script's error has the word within the text
    return isinstance(error, ResponseError) and any(word in text for word in _AWAY_REPLIES)


def is_full(error: Exception) -> bool:
    """Return whether the server refuses the command because its memory is used up."""
    if isinstance(error, OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, ResponseError) and ("OOM" in text or "used memory" in text)
