"""Address of a Redis server or Cluster, and the connections of this process to it."""

from __future__ import annotations

from typing import Any

import redis
from msgspec import Struct
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry as ThreadRetry

from common.errors import ConfigError

_WAIT_S = 10  # for a connection of the pool


class RedisAddress(Struct, frozen=True):
    """A URL, whether a Cluster is behind it, and the setting that a complaint about it names."""

    url: str
    cluster: bool
    setting: str
    expected: str = "redis://, rediss:// or unix://"

    def client(self, *, timeout_s: float, connect_s: float, connections: int) -> Any:
        """Return a client of redis-py that answers with raw bytes and retries nothing. ConfigError if the URL is none.

        `timeout_s` and `connect_s` bound one reply and one connection; `connections` is the most it opens (a node).
        """
        options = _options(timeout_s, connect_s) | {"decode_responses": False}
        try:
            if self.cluster:
                client: Any = RedisCluster.from_url(
                    self.url,
                    **options,
                    retry=Retry(NoBackoff(), 1),
                    max_connections=connections,
                    require_full_coverage=False,
                    reinitialize_steps=0,  # else some moved slots close connections that are in use
                )
                for name in list(client.response_callbacks):
                    if not name.startswith(("CLUSTER", "COMMAND")):  # what the client itself reads
                        del client.response_callbacks[name]
                return client
            pool = BlockingConnectionPool.from_url(
                self.url,
                **options,
                retry=Retry(NoBackoff(), 0),
                max_connections=connections,
                timeout=_WAIT_S,
            )
        except (ValueError, RedisError) as error:
            raise ConfigError(
                f"{self.setting} is {self.url!r}: {error}; expected {self.expected}"
            ) from error
        client = Redis(connection_pool=pool)
        client.response_callbacks.clear()  # raw replies: the same in every version and in a Cluster
        return client

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
