"""Every config field by every way in: what cannot be used ends the start with one sentence and status 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.arguments import SECRET_FIELDS, parse
from common.config import PREFIX, SERVICES, Common, RouterConfig, load
from common.errors import ConfigError
from common.log import mask

# As text, the way variables and flags come; the file holds them as strings, too.
TEXTS = (
    "x", "-1", "0", "1e999", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "0x10", "1_0", "٣", "true", "null", "[]",
    "{}", "..", "../../etc/passwd", "/dev/zero", "/no/such/place", "a\nb", "a\tb", "\x1b[31m", "é" * 300, "\udcff",
    "x" * 100_000, "%s%n", "$(id)", "'; DROP", "redis://:secret-word@no host", "redis://:secret-word@[::1:99999",
)  # fmt: skip
# As TOML, for types that only a file has.
TOMLS = (
    "nan",
    "inf",
    "-inf",
    "1e400",
    "[]",
    "{}",
    "[[[1]]]",
    "true",
    "1979-05-27",
    '"\\u0000"',
    "-1",
    "1.5",
    "9" * 30,
)
_SHARED = set(Common.__struct_fields__)  # once is enough
FIELDS = [
    (cls, field)
    for cls in SERVICES
    for field in msgspec.structs.fields(cls)
    if cls is SERVICES[0] or field.name not in _SHARED
]
every_field = pytest.mark.parametrize(
    ("cls", "field"), FIELDS, ids=[f"{cls.__name__}.{field.name}" for cls, field in FIELDS]
)


def _outcome(
    cls: type[Common], argv: list[str], env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> Common | None:
    """Return the config, or None if it was refused as it must be."""
    status: Any = 0
    config: Common | None = None
    try:
        config, _ = parse(cls, argv, env, "spillway")
    except SystemExit as ended:
        status = ended.code
    if config is None:
        said = capsys.readouterr().err
        assert status == 2
        assert said.startswith("spillway: ")
        assert said.count("\n") == 1
        assert len(said) < 2000
        assert "\x1b" not in said
        assert "secret-word" not in said
    return config


def _loaded(cls: type[Common], env: dict[str, str], file: Path | None = None) -> Common | None:
    """Return the config as `parse` loads it, or None if it was refused as it must be."""
    try:
        return load(cls, env, file=str(file) if file else None)
    except ConfigError as error:
        sentence = mask(str(error))
    assert 0 < len(sentence) < 1500
    assert "\n" not in sentence
    assert "\x1b" not in sentence
    assert "secret-word" not in sentence
    return None


def _sane(config: Common, name: str) -> None:
    """What was taken is of the field's type, and no number that is none."""
    value = getattr(config, name)
    msgspec.convert(msgspec.to_builtins(config), type(config))
    assert not isinstance(value, float) or (math.isfinite(value) and value < 1e9)
    assert not isinstance(value, int) or value < 1 << 60
    assert not isinstance(value, str) or value.isprintable()


@every_field
def test_variables(cls: type[Common], field: Any) -> None:
    """A variable's nonsense is refused, or is a value the field can have."""
    for text in TEXTS:
        config = _loaded(cls, {PREFIX + field.name.upper(): text})
        if config is not None:
            _sane(config, field.name)


@every_field
def test_flags(cls: type[Common], field: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag's nonsense is refused, or is a value the field can have."""
    flag = f"--{field.name.replace('_', '-')}"
    for text in TEXTS[::3]:
        config = _outcome(cls, [f"{flag}={text}"], {}, capsys)
        assert config is None or field.name not in SECRET_FIELDS
        if config is not None:
            _sane(config, field.name)
    assert field.type is bool or _outcome(cls, [flag], {}, capsys) is None


@every_field
def test_file(cls: type[Common], field: Any, tmp_path: Path) -> None:
    """A file's nonsense is refused, or is a value the field can have."""
    file = tmp_path / "c.toml"
    for text in (
        *TOMLS,
        *(f'"{word}"' for word in TEXTS if word.isprintable() and '"' not in word),
    ):
        file.write_text(f"{field.name} = {text}\n", encoding="utf-8", errors="surrogateescape")
        config = _loaded(cls, {}, file)
        if config is not None:
            _sane(config, field.name)


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.__name__)
def test_unknown_names(
    cls: type[Common], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name nobody reads is refused wherever it stands."""
    file = tmp_path / "c.toml"
    for name in ("prot", "PORT2", "x" * 50_000, "", "é", "port "):
        assert _outcome(cls, [], {PREFIX + name: "1"}, capsys) is None
        file.write_text(f'"{name}" = 1\n', encoding="utf-8")
        assert _outcome(cls, ["--config", str(file)], {}, capsys) is None
    assert _outcome(cls, ["--prot", "1"], {}, capsys) is None
    assert _outcome(cls, ["word"], {}, capsys) is None
    for instance in ("", "..", "a/b", "A", "x" * 33, "a\n", "é"):
        assert _outcome(cls, [f"--instance={instance}"], {}, capsys) is None


def _files(directory: Path) -> Iterator[Path]:
    contents = {
        "empty-key": b"= 1",
        "binary": bytes(range(256)), "not-utf8": b'host = "\xff"', "deep": b"a = " + b"[" * 100_000,
        "twice": b"port = 1\nport = 2", "big": b"#" * 5_000_000, "table": b"[port]\nx = 1",
        "open": b'host = "', "nul": b"host = '\x00'", "dotted": b"port.x.y = 1",
    }  # fmt: skip
    for name, content in contents.items():
        path = directory / name
        path.write_bytes(content)
        yield path
    (directory / "folder").mkdir()
    (directory / "loop").symlink_to("loop")
    yield from (directory / name for name in ("folder", "loop", "missing", "x" * 300))
    yield from (Path("/dev/zero"), Path("/proc/self/mem"), Path("/dev/null/x"))


def test_files_that_are_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever --config names, the sentence names it, and nothing is read without end."""
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (*_files(tmp_path), tmp_path / "pipe"):
        assert _outcome(RouterConfig, ["--config", str(path)], {}, capsys) is None, path
