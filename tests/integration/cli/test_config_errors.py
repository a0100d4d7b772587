"""A configuration that cannot be used: one sentence with what is wrong and what is expected, status 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli import main
from tests.integration.cli.conftest import Spillway

CASES: dict[str, tuple[dict[str, str], list[str], str]] = {
    "unknown variable": ({"SPILLWAY_PROT": "1"}, [], "SPILLWAY_PORT"),
    "wrong type": ({"SPILLWAY_PORT": "eighty"}, [], "SPILLWAY_PORT is 'eighty'"),
    "out of range": ({"SPILLWAY_PORT": "70000"}, [], "SPILLWAY_PORT is '70000'"),
    "another service's": ({"SPILLWAY_SEARCH_SLO_S": "-1"}, [], "SPILLWAY_SEARCH_SLO_S is '-1'"),
    "flag": ({}, ["--port", "x"], "--port is 'x'"),
    "no such file": ({}, ["--config", "/no/such.toml"], "/no/such.toml: No such file"),
    "not TOML": ({}, ["--config", "{tmp}/bad.toml"], "expected TOML"),
    "unknown name in file": (
        {},
        ["--config", "{tmp}/unknown.toml"],
        "unknown name 'prot'; expected one of port,",
    ),
    "one setting twice in file": (
        {},
        ["--config", "{tmp}/twice.toml"],
        "'data_dir' and 'data-dir' name one setting",
    ),
    "variable's name in file": (
        {},
        ["--config", "{tmp}/variable.toml"],
        "variable.toml: SPILLWAY_PORT is 'x'",
    ),
    "value in file": ({}, ["--config", "{tmp}/value.toml"], "value.toml: port is 'x'"),
    "durability": ({"SPILLWAY_DURABILITY": "replicated"}, [], "SPILLWAY_REDIS_URL"),
    "unknown durability": ({"SPILLWAY_DURABILITY": "maybe"}, [], "SPILLWAY_DURABILITY is 'maybe'"),
    "memory": ({"SPILLWAY_REDIS_MAXMEMORY": "lots"}, [], "expected a size like 1gb"),
    "server": ({"SPILLWAY_REDIS_SERVER": "/no/server"}, [], "expected a server's executable"),
    "workers": (
        {"SPILLWAY_OVERFLOW_WORKERS": "many"},
        [],
        "SPILLWAY_OVERFLOW_WORKERS is 'many': expected one of auto, 0 to 256",
    ),
    "cores": ({"SPILLWAY_CORES": "all"}, [], "SPILLWAY_CORES is 'all'"),
    "others' cores": ({"SPILLWAY_CORES": "8191"}, [], "expected cores out of"),
    "host": ({"SPILLWAY_HOST": "no.such.host.invalid"}, [], "SPILLWAY_HOST is 'no.such"),
    "certificate": ({"SPILLWAY_TLS_CERT": "/no/cert"}, [], "SPILLWAY_TLS_CERT is '/no/cert'"),
    "redis url": ({"SPILLWAY_REDIS_URL": "http://x"}, [], "SPILLWAY_REDIS_URL"),
}


@pytest.mark.parametrize("case", CASES)
def test_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, the sentence names the culprit, the status is 2."""
    (tmp_path / "bad.toml").write_text("= 1")
    (tmp_path / "unknown.toml").write_text("prot = 1")
    (tmp_path / "value.toml").write_text("port = 'x'")
    (tmp_path / "twice.toml").write_text("data_dir = 'a'\ndata-dir = 'b'")
    (tmp_path / "variable.toml").write_text("SPILLWAY_PORT = 'x'")
    env, words, expected = CASES[case]
    for name in [name for name in os.environ if name.startswith("SPILLWAY_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]

    status = main.main(["up", "--data-dir", str(tmp_path / "data"), *words])

    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("spillway: ")
    assert expected in said
    assert not list(tmp_path.glob("data/logs/*.log"))


def test_data_directory_is_a_file(stubbed: Spillway, tmp_path: Path) -> None:
    """A data directory that cannot be one is named."""
    (tmp_path / "file").write_text("")

    done = stubbed.run("up", data_dir=tmp_path / "file" / "data")

    assert done.returncode == 2
    assert "Not a directory; expected a directory that can be written" in done.stderr


def test_port_in_use(stubbed: Spillway) -> None:
    """A port that another program has is named, before anything is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = stubbed.run("up", "--port", str(port))

    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1: Address already in use" in done.stderr


def test_passwords_are_masked(tmp_path: Path) -> None:
    """A Redis address that cannot be used is shown without its password, by services and by the command."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPILLWAY_")}
    env |= {"SPILLWAY_REDIS_URL": "redis://user:secret-word@host:port/x"}
    for words in (["-m", "services.vector_search"], ["-m", "cli.main", "keys", "list"]):
        done = subprocess.run(
            [sys.executable, *words, "--data-dir", str(tmp_path)],
            env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        sentence = done.stderr.splitlines()[-1]
        assert sentence.startswith("spillway: SPILLWAY_REDIS_URL is 'redis://user:***@")
        assert "secret-word" not in done.stderr
