"""The servers that all other tests stand on."""

from __future__ import annotations

from tests.support.servers import Cluster, Server, every_cluster, every_server


@every_server
def test_kill_keeps_what_was_acknowledged(redis_server: Server) -> None:
    """A reply means that kill -9 of the server does not lose the write."""
    for number in range(200):
        redis_server.command("SET", f"key{number}", number)
    redis_server.restart()
    assert redis_server.command("DBSIZE") == 200


@every_cluster
def test_cluster_is_whole(redis_cluster: Cluster) -> None:
    """Every slot of the cluster is served."""
    slots = [server.cluster_info()["cluster_slots_ok"] for server in redis_cluster.servers]

    assert slots == ["16384"] * 3
