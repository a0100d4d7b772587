"""Metadata filters: each is compiled to SQL over the attribute index, and to a predicate of one document's attributes.

SQL finds the documents that match a new filter; the predicate adds new documents to a cached set. A test compares both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from common.errors import InvalidRequest

MAX_DEPTH = 16
MAX_CONDITIONS = 256
MAX_VALUES = 1000
MAX_PARAMETERS = 16_000
Value = tuple[int, Any]
NULL, BOOL, NUMBER, STRING, CONTAINER = range(5)
_INT64 = 1 << 63
_ORDER: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "$gt": (">", lambda a, b: a > b),
    "$gte": (">=", lambda a, b: a >= b),
    "$lt": ("<", lambda a, b: a < b),
    "$lte": ("<=", lambda a, b: a <= b),
}
_ALL = "SELECT number AS document FROM document"
_encoder = msgspec.json.Encoder(order="deterministic")
Attributes = dict[str, set[Value]]
# The name of the table with the matching documents, and the predicate.
_Part = tuple[str, Callable[[Attributes], bool]]


def value_of(value: Any) -> Value | None:
    """Return (kind, comparable value) of a JSON scalar, None for other values; `true` is not `1`."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NULL, 0
    if isinstance(value, bool):
        return BOOL, int(value)
    if isinstance(value, int):
        return NUMBER, value if -_INT64 <= value < _INT64 else float(value)
    if isinstance(value, float):
        return NUMBER, value
    if isinstance(value, str):
        return STRING, value
    return None


def _walk(path: str, value: Any) -> Iterator[tuple[str, Value]]:
    scalar = value_of(value)
    if scalar is not None:
        yield path, scalar
    elif isinstance(value, dict):
        if path:
            yield path, (CONTAINER, 0)
        for key, inner in value.items():
            yield from _walk(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        yield path, (CONTAINER, 0)
        for inner in value:
            yield from _walk(path, inner)


def attributes(metadata: dict[str, Any]) -> Attributes:
    """Return every dotted path of the metadata with its values; a list counts as each of its elements."""
    found: Attributes = {}
    for path, value in _walk("", metadata):
        found.setdefault(path, set()).add(value)
    return found


class Filter:
    """A checked filter: `key` (canonical), `sql` with `parameters` (document numbers), `matches(attributes)`.

    InvalidRequest (`invalid_filter`) names the offending part.
    """

    def __init__(self, source: dict[str, Any]) -> None:
        self._conditions = 0
        self.parameters: list[Any] = []
        try:
            self.key = _encoder.encode(source)
        except (TypeError, ValueError, RecursionError) as error:
            raise _bad("filter", str(error)) from error
        # One table per node, by name: nested selects would overflow SQLite's parser.
        self._tables: list[str] = []
        top, self.matches = self._all(source, 0)
        tables = ", ".join(f"f{i} AS ({sql})" for i, sql in enumerate(self._tables))
        self.sql = f"WITH {tables} SELECT document FROM {top}"  # noqa: S608 - our names and marks
        if len(self.parameters) > MAX_PARAMETERS:
            raise _bad("filter", f"more than {MAX_PARAMETERS} values in all")

    def _all(self, source: Any, depth: int) -> _Part:
        if not isinstance(source, dict):
            raise _bad("filter", f"expected an object, got {type(source).__name__}")
        if depth > MAX_DEPTH:
            raise _bad("filter", f"nested deeper than {MAX_DEPTH}")
        return self._and([self._field(name, value, depth) for name, value in source.items()])

    def _field(self, name: Any, value: Any, depth: int) -> _Part:
        if not isinstance(name, str):
            raise _bad("filter", "field names are strings")
        if name in ("$and", "$or"):
            if not isinstance(value, list) or not value:
                raise _bad(name, "expected a list of at least one filter")
            parts = [self._all(item, depth + 1) for item in value]
            return self._and(parts) if name == "$and" else self._joined(parts, "UNION", any)
        if name == "$not":
            return self._not(self._all(value, depth + 1))
        if name.startswith("$"):
            raise _bad(name, "expected $and, $or, $not or a field")
        if isinstance(value, dict):
            if not value:
                raise _bad(name, "expected a value or an object of operators")
            return self._and([self._operator(name, op, operand) for op, operand in value.items()])
        return self._operator(name, "$eq", value)

    def _operator(self, path: str, op: Any, operand: Any) -> _Part:
        self._conditions += 1
        if self._conditions > MAX_CONDITIONS:
            raise _bad(path, f"more than {MAX_CONDITIONS} conditions")
        if op in ("$eq", "$ne"):
            part = self._any_of(path, [operand], str(op))
            return self._not(part) if op == "$ne" else part
        if op in ("$in", "$nin"):
            if not isinstance(operand, list) or len(operand) > MAX_VALUES:
                raise _bad(path, f"{op} expects a list of at most {MAX_VALUES} values")
            part = self._any_of(path, operand, str(op))
            return self._not(part) if op == "$nin" else part
        if op == "$exists":
            if not isinstance(operand, bool):
                raise _bad(path, "$exists expects true or false")
            self.parameters.append(path)
            sql = "SELECT DISTINCT document FROM attribute WHERE path=?"
            part = self._table(sql), lambda a: path in a
            return part if operand else self._not(part)
        if op in _ORDER:
            return self._ordered(path, str(op), operand)
        known = "$eq $ne $gt $gte $lt $lte $in $nin $exists"
        raise _bad(path, f"unknown operator {op!r}; expected one of {known}")

    def _any_of(self, path: str, operands: list[Any], op: str) -> _Part:
        wanted: set[Value] = set()
        for operand in operands:
            value = value_of(operand)
            if value is None:
                raise _bad(path, f"{op} expects strings, numbers, booleans or null")
            wanted.add(value)
        selects = []
        for kind in sorted({kind for kind, _ in wanted}):
            values = [value for other, value in wanted if other == kind]
            self.parameters += [path, kind, *values]
            selects.append(
                "SELECT document FROM attribute WHERE path=? AND kind=? AND value IN "  # noqa: S608 - marks only
                f"({','.join('?' * len(values))})"
            )
        sql = " UNION ".join(selects) or f"{_ALL} WHERE 0"
        return self._table(sql), lambda a: not wanted.isdisjoint(a.get(path, ()))

    def _ordered(self, path: str, op: str, operand: Any) -> _Part:
        value = value_of(operand)
        if value is None or value[0] not in (NUMBER, STRING):
            raise _bad(path, f"{op} expects a number or a string")
        sign, compare = _ORDER[op]
        self.parameters += [path, *value]
        sql = f"SELECT DISTINCT document FROM attribute WHERE path=? AND kind=? AND value{sign}?"  # noqa: S608

        def matches(a: Attributes) -> bool:
            return any(kind == value[0] and compare(v, value[1]) for kind, v in a.get(path, ()))

        return self._table(sql), matches

    def _table(self, sql: str) -> str:
        self._tables.append(sql)
        return f"f{len(self._tables) - 1}"

    def _and(self, parts: list[_Part]) -> _Part:
        if not parts:
            return self._table(_ALL), lambda _: True
        return self._joined(parts, "INTERSECT", all)

    def _joined(
        self, parts: list[_Part], word: str, which: Callable[[Iterable[bool]], bool]
    ) -> _Part:
        if len(parts) == 1:
            return parts[0]
        tests = [test for _, test in parts]
        sql = f" {word} ".join(f"SELECT document FROM {name}" for name, _ in parts)  # noqa: S608
        return self._table(sql), lambda a: which(test(a) for test in tests)

    def _not(self, part: _Part) -> _Part:
        name, test = part
        sql = f"{_ALL} EXCEPT SELECT document FROM {name}"  # noqa: S608
        return self._table(sql), lambda a: not test(a)


def _bad(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"filter: {where}: {why}", code="invalid_filter", param="filter")
