"""Command lines of services."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.arguments import parse
from common.config import RouterConfig, SearchConfig


def test_flags_beat_variables_beat_file(tmp_path: Path) -> None:
    """A flag wins over the environment, which wins over the file, which wins over the default."""
    file = tmp_path / "c.toml"
    file.write_text("port = 1\nmax_texts = 2\nmax_tokens = 3\n")
    env = {"SPILLWAY_PORT": "4", "SPILLWAY_MAX_TEXTS": "5"}

    config, instance = parse(
        RouterConfig, ["--config", str(file), "--port", "6", "--instance", "b"], env
    )

    assert (config.port, config.max_texts, config.max_tokens) == (6, 5, 3)
    assert instance == "b"
    assert config.request_timeout_s == RouterConfig().request_timeout_s


@pytest.mark.parametrize(
    "name", ["max_texts", "max-texts", "MAX_TEXTS", "SPILLWAY_MAX_TEXTS", "spillway_max_texts"]
)
def test_names_in_the_file(name: str, tmp_path: Path) -> None:
    """The file takes the names that help, documents and error messages give, and does not drop one silently."""
    file = tmp_path / "c.toml"
    file.write_text(f"{name} = 7\n")

    assert parse(RouterConfig, ["--config", str(file)], {})[0].max_texts == 7


def test_the_name_an_error_gives_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the message about an unknown name of the file offers can be written into the file."""
    file = tmp_path / "c.toml"
    file.write_text("max_text = 7\n")
    with pytest.raises(SystemExit):
        parse(RouterConfig, ["--config", str(file)], {})
    offered = capsys.readouterr().err.split("expected one of ")[1].split(",")[0]
    file.write_text(f"{offered} = 7\n")

    assert parse(RouterConfig, ["--config", str(file)], {})[0].max_texts == 7


def test_booleans_have_both_forms() -> None:
    """A yes-or-no field is given as --field or --no-field."""
    assert parse(SearchConfig, ["--redis-cluster"], {})[0].redis_cluster is True
    env = {"SPILLWAY_REDIS_CLUSTER": "yes"}
    assert parse(SearchConfig, ["--no-redis-cluster"], env)[0].redis_cluster is False


@pytest.mark.parametrize(
    ("argv", "env", "expected"),
    [
        (["--port", "x"], {}, "--port is 'x'"),
        (["--instance", "../x"], {}, "--instance is '../x'"),
        ([], {"SPILLWAY_KEYS": "maybe"}, "SPILLWAY_KEYS is 'maybe'"),
        ([], {"SPILLWAY_PROT": "1"}, "unknown variable SPILLWAY_PROT"),
    ],
)
def test_one_sentence(
    argv: list[str], env: dict[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be used ends the process with status 2 and one sentence."""
    with pytest.raises(SystemExit) as exit_:
        parse(RouterConfig, argv, env)

    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert expected in said
    assert said.count("\n") == 1


def test_secrets_are_no_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """An address with a password cannot be given where `ps` would show it."""
    with pytest.raises(SystemExit):
        parse(RouterConfig, ["--redis-url", "redis://:secret@x"], {})
    assert "unrecognized arguments" in capsys.readouterr().err
