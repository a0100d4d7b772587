"""Command lines of services: every config field is a flag, so `ps` shows a process' settings."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from common.config import Common, load
from common.errors import ConfigError
from common.log import mask

_INSTANCE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
# `ps` shows flags to every user of the machine, so these fields come from the environment or the file only.
SECRET_FIELDS = frozenset({"redis_url", "pages_url", "host_secret"})
C = TypeVar("C", bound=Common)
_SHOWN = 500


class Parser(argparse.ArgumentParser):
    """A parser that ends the process with status 2 and one sentence, without secrets, after a wrong command line."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake in the command line, and end the process with status 2."""
        shown = mask(message).encode("unicode_escape").decode()[:_SHOWN]
        sys.stderr.write(f"spillway: {shown}; {self.prog} --help shows the flags\n")
        raise SystemExit(2)


def parser(cls: type[Common], prog: str) -> argparse.ArgumentParser:
    """Return a parser with --config, --instance and one flag per field of `cls`."""
    made = Parser(prog=prog, allow_abbrev=False, description=cls.__doc__)
    made.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file; a name in it is a flag's or a variable's, as data-dir, data_dir or SPILLWAY_DATA_DIR",
    )
    made.add_argument("--instance", metavar="NAME", default="0", help="tells replicas apart")
    for field in msgspec.structs.fields(cls):
        if field.name in SECRET_FIELDS:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        help_text = f"default: {field.default!r}".replace("%", "%%")
        if field.type is bool:
            made.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=None, help=help_text
            )
        else:
            made.add_argument(flag, default=None, metavar="VALUE", help=help_text)
    return made


def build(cls: type[C], parsed: argparse.Namespace, env: Mapping[str, str]) -> C:
    """Build the config from parsed flags, the environment and the file; ConfigError names a wrong value."""
    args: dict[str, Any] = {
        name: value for name, value in vars(parsed).items() if name not in {"config", "instance"}
    }
    return load(cls, env, file=parsed.config, args=args)


def parse(
    cls: type[C], argv: Sequence[str], env: Mapping[str, str], prog: str | None = None
) -> tuple[C, str]:
    """Return a service's config and instance name; ends the process with status 2 and a sentence on a wrong value."""
    flags = parser(cls, prog or f"spillway {cls.__name__.removesuffix('Config').lower()}")
    parsed = flags.parse_args(argv)
    try:
        if not _INSTANCE.match(parsed.instance):
            raise ConfigError(
                f"--instance is {parsed.instance!r}: expected at most 32 of a-z, 0-9 and '-'"
            )
        return build(cls, parsed, env), parsed.instance
    except ConfigError as error:
        sys.stderr.write(f"spillway: {mask(str(error))}\n")
        raise SystemExit(2) from error
