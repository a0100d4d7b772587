"""Recorded loads from JSON lines or CSV: the times of arrivals, and their queries."""

from __future__ import annotations

import csv
import datetime as dt
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from common.errors import ConfigError

_FIELDS = ("timestamp_ms", "timestamp")
_EXPECTED = "expected JSON lines or CSV"
Kind = Literal["whole", "fraction", "date", "nonsense"]


class RecordedLoad(NamedTuple):
    """The arrivals' seconds from the first one, rising, and their queries; whether the unit ms was guessed."""

    times_s: list[float]
    counts: list[int]
    guessed: bool


def read(path: Path, unit: Literal["auto", "s", "ms"] = "auto") -> RecordedLoad:
    """Read the arrivals of a file, in any order; ConfigError names the file, the line and the expected form.

    A line has `timestamp_ms`, or `timestamp`, a date or a number in `unit` (auto: ms if all are whole numbers, else s);
    and `queries`, by default 1.
    """
    arrivals: list[tuple[float, int]] = []
    kinds: set[Kind] = set()
    field = ""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may never end
            raise ConfigError(f"{path} is no regular file: {_EXPECTED}")
        with path.open(encoding="utf-8-sig", newline="") as file:
            for where, row in _rows(path, file):
                field = field or next((name for name in _FIELDS if name in row), _FIELDS[1])
                at, kind = _number(where, field, row.get(field))
                arrivals.append((at, _count(where, row.get("queries"))))
                kinds.add(kind)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {_EXPECTED}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error.reason}); {_EXPECTED}") from None
    if not arrivals:
        raise ConfigError(f"{path}: no arrival; expected a line for each")
    arrivals.sort()
    guessed = unit == "auto" and kinds == {"whole"} and field != _FIELDS[0]
    in_ms = guessed or ((unit == "ms" or field == _FIELDS[0]) and "date" not in kinds)
    first, scale = arrivals[0][0], 1000 if in_ms else 1
    times = [(at - first) / scale for at, _ in arrivals]
    return RecordedLoad(times, [count for _, count in arrivals], guessed)


def _rows(path: Path, file: TextIO) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (where, fields) of each arrival: of JSON if the file begins with a brace, else of CSV with a header."""
    begins = file.read(1)
    file.seek(0)
    if begins == "{":
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}, line {number}", _object(f"{path}, line {number}", line)
        return
    reader = csv.DictReader(file)
    try:
        reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or []]
        for row in reader:
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        number = reader.line_num + 1  # line_num counts the lines that were read
        raise ConfigError(f"{path}, line {number}: {error}; {_EXPECTED}") from None


def _object(where: str, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected a JSON object")
    return row


def _number(where: str, field: str, value: Any) -> tuple[float, Kind]:
    if value is None:
        raise ConfigError(f"{where}: expected a field 'timestamp' or 'timestamp_ms'")
    at, kind = _parsed(value)
    if kind == "nonsense":
        raise ConfigError(f"{where}: {field} is {repr(value)[:100]}: expected a number or a date")
    return at, kind


def _count(where: str, value: Any) -> int:
    if value is None:
        return 1
    count, kind = _parsed(value)
    if kind != "whole" or not 1 <= count <= 1 << 50:
        raise ConfigError(
            f"{where}: queries is {repr(value)[:100]}: expected a whole number from 1"
        )
    return int(count)


def _parsed(value: Any) -> tuple[float, Kind]:
    """Return a number, or a date as seconds since 1970, and which of both it is."""
    if isinstance(value, str):
        text = value.strip()
        whole = text.removeprefix("-").isdecimal()
        try:
            number = float(text)
        except ValueError:
            return _date(text)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        whole = isinstance(value, int)
        number = float(value) if abs(value) < 1e300 else math.inf
    else:
        return math.nan, "nonsense"
    if not math.isfinite(number):
        return number, "nonsense"
    return number, "whole" if whole else "fraction"


def _date(text: str) -> tuple[float, Kind]:
    try:
        date = dt.datetime.fromisoformat(text)
        if date.tzinfo is None:
            date = date.replace(tzinfo=dt.UTC)
        return date.timestamp(), "date"
    except (ValueError, OverflowError):
        return math.nan, "nonsense"
