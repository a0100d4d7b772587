"""A sweep: a rival's settings are tried one after another, each on the best one before it, and all are written down."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

Setting = Mapping[str, str | int]
Rate = Callable[[Setting], Awaitable[float]]


class Swept(msgspec.Struct, frozen=True):
    """One setting of a rival as tried: how much it did a second; `why` says why there is no figure."""

    setting: dict[str, Any]
    rate: float
    why: str = ""


async def sweep(
    rate: Rate,
    base: Setting,
    variants: Sequence[Setting],
    failures: tuple[type[Exception], ...],
) -> list[Swept]:
    """Try a setting, then each variant of the best one so far; return all that were tried, in this order.

    A setting with which the rival fails in one of the ways named stands with its reason.
    """
    tried = list[Swept]()
    for variant in ({}, *variants):
        setting = {**(best(tried) if tried else base), **variant}
        try:
            tried.append(Swept(setting, await rate(setting)))
        except failures as error:
            tried.append(Swept(setting, 0.0, _reason(error)))
    return tried


def _reason(error: Exception) -> str:
    """Return the last line of an error, which names what was raised; of a path, its last name alone."""
    last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
    return re.sub(r"(?:/[\w.-]+)+/", "", last.strip())[-300:]


def best(tried: Sequence[Swept]) -> Setting:
    """Return the fastest of the settings tried."""
    return max(tried, key=lambda each: each.rate).setting


def told(setting: Mapping[str, Any]) -> str:
    """Return a setting in words."""
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def distinct(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each setting once."""
    return list({told(setting): dict(setting) for setting in settings}.values())


def joined(settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return every value of each name that was best somewhere."""
    values: dict[str, dict[str, None]] = {}
    for setting in settings:
        for name, value in setting.items():
            values.setdefault(name, {})[str(value)] = None
    return {name: " or ".join(some) for name, some in values.items()}
