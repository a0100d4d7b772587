"""The embedded server's files: what is synced, what a log keeps."""

from __future__ import annotations

from pathlib import Path

from cli.embedded import sync, write_config, write_pages_config
from cli.instance import Instance
from cli.process import LogFile
from common.config import SupervisorConfig
from tests.support.servers import Server, every_server


@every_server
def test_sync_finds_the_append_only_file(redis_server: Server) -> None:
    """Whatever the server's generation calls its file, also after a rewrite, it is synced."""
    redis_server.command("SET", "key", "value")
    assert sync(redis_server.directory) == 1
    redis_server.command("BGREWRITEAOF")
    assert sync(redis_server.directory) >= 1


def test_config_names_the_level(tmp_path: Path) -> None:
    """`machine` syncs before each reply; both levels keep every write and drop none for memory."""
    instance = Instance.at(str(tmp_path))
    instance.prepare()
    for level, fsync in (("process", "no"), ("machine", "always")):
        config = SupervisorConfig(durability=level)  # type: ignore[arg-type]
        lines = write_config(instance, config).read_text().splitlines()
        assert f"appendfsync {fsync}" in lines
        assert "appendonly yes" in lines
        assert "maxmemory-policy noeviction" in lines
        assert "hash-max-ziplist-value 512" in lines


def test_the_server_for_pages_keeps_no_file(tmp_path: Path) -> None:
    """KV pages' server has room for a tenth more than they may take, drops none by itself and writes nothing."""
    instance = Instance.at(str(tmp_path))
    instance.prepare()
    path = write_pages_config(instance, SupervisorConfig(pages_bytes=1000))
    lines = path.read_text().splitlines()

    assert path != write_config(instance, SupervisorConfig())
    assert {"maxmemory 1100", "maxmemory-policy noeviction", "appendonly no", 'save ""'} <= {*lines}
    assert f'unixsocket "{instance.pages_socket}"' in lines


def test_logs_are_bounded(tmp_path: Path) -> None:
    """A log that has grown to its cap is put aside, and only so many are kept."""
    log = LogFile(tmp_path / "x.log", cap_bytes=1000, keep=2)
    for number in range(100):
        log.write(f"{number:099}".encode())
    log.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert (tmp_path / "x.log").read_text().splitlines()[-1].endswith("99")
