"""Address of a Redis server or Cluster, and the connections of this process to it."""

from __future__ import annotations

from typing import Any

import redis
from msgspec import Struct
from redis.asyncio import ConnectionPool, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry as ThreadRetry

from common.errors import ConfigError
from common.redis.connections import ServerConnections
from common.redis.values import ValueConnections


class RedisAddress(Struct, frozen=True):
    """A URL, whether it is a Cluster's, and the setting that errors about the URL name."""

    url: str
    cluster: bool
    setting: str
    expected: str = "redis://, rediss:// or unix://"

    def client(self, *, timeout_s: float, connect_s: float, connections: int) -> Any:
        """Return a client that returns raw bytes and retries nothing; ConfigError for an invalid URL.

        `timeout_s` bounds the wait for one reply, `connect_s` the opening of one connection, and `connections` the
        connections to one node of a Cluster.
        """
        try:
            if self.cluster:
                client = RedisCluster.from_url(
                    self.url,
                    **_options(timeout_s, connect_s),
                    retry=Retry(NoBackoff(), 1),
                    max_connections=connections,
                    require_full_coverage=False,
                    reinitialize_steps=0,  # else moved slots close connections in use
                )
                for name in list(client.response_callbacks):
                    if not name.startswith(("CLUSTER", "COMMAND")):  # the client reads these
                        del client.response_callbacks[name]
                return client
            pool = ConnectionPool.from_url(
                self.url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=None
            )
            return ServerConnections(pool.make_connection, timeout_s=timeout_s, connect_s=connect_s)
        except (ValueError, RedisError) as error:
            raise self._bad(error) from error

    def values(self, *, timeout_s: float, connect_s: float) -> ValueConnections | None:
        """Return connections that read large values without copies; None for a Cluster, or over TLS.

        ConfigError for an invalid URL.
        """
        if self.cluster:
            return None
        try:
            options = dict(parse_url(self.url))
        except (ValueError, RedisError) as error:
            raise self._bad(error) from error
        if options.get("connection_class") is SSLConnection:
            return None
        return ValueConnections(options, timeout_s=timeout_s, connect_s=connect_s)

    def _bad(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self.setting} is {self.url!r}: {error}; expected {self.expected}")

    def thread_client(self, *, timeout_s: float, connect_s: float) -> Any:
        """Return a blocking client for a thread, which retries nothing either."""
        kind = redis.RedisCluster if self.cluster else redis.Redis
        return kind.from_url(
            self.url,
            **_options(timeout_s, connect_s),
            retry=ThreadRetry(NoBackoff(), 1 if self.cluster else 0),
        )


def _options(timeout_s: float, connect_s: float) -> dict[str, Any]:
    return {"socket_timeout": timeout_s, "socket_connect_timeout": connect_s, "protocol": 2}
