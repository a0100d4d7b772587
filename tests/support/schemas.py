"""JSON Schemas to bind answers with, and independent judges of the answers: `SCHEMAS` has more than two hundred.

Most are bounded, so that a model which draws at random comes to an end: texts have a greatest length, lists a greatest
number of items. Numbers with a fraction and some formats are not, nor are the names of a free map.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import jsonschema_rs

Schema = dict[str, Any]
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 999}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SHORT: Schema = {"type": "string", "maxLength": 12}
PATTERNS = (
    "^a$", "^[A-Z]{2}-[0-9]{4}$", "^(red|green|blue)$", "^[0-9a-f]{8}$", "^(0|[1-9][0-9]{0,3})$",
    "^\\+[0-9]{1,3} [0-9]{6,10}$", "^[a-z]{1,5}(_[a-z]{1,5}){0,2}$", "^.{3}$", "^[^\"\\\\]{0,5}$",
    "^(a|b){0,9}abb$", "^v[0-9]\\.[0-9]{1,2}\\.[0-9]{1,3}$", "^#[0-9a-fA-F]{6}$", "^[A-Z][a-z]{2,6}$",
    "^(?:[01][0-9]|2[0-3]):[0-5][0-9]$", "^ ?x ?$", "^[äöü]{1,3}$", "^\\$[0-9]{1,4}\\.[0-9]{2}$",
    "^(yes|no)(, (yes|no)){0,2}$", "^[01]{4}( [01]{4})?$", "^[A-Za-z0-9]{4}(-[A-Za-z0-9]{4}){3}$",
)  # fmt: skip
FORMATS = ("date-time", "date", "time", "duration", "ipv4", "ipv6", "uuid")


def record(required: Schema, optional: Schema | None = None, **more: Any) -> Schema:
    """Return the schema of an object with these properties and no others."""
    shown = {"type": "object", "properties": {**required, **(optional or {})}}
    return {**shown, "required": list(required), "additionalProperties": False, **more}


def array(items: Schema | bool, least: int = 0, most: int = 3, **more: Any) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def _scalars() -> Iterator[tuple[str, Schema]]:
    yield from (("boolean", {"type": "boolean"}), ("null", {"type": "null"}))
    for low, high in ((0, 9), (-5, 5), (100, 1000), (-20, -10), (7, 7), (0, 10**9)):
        yield f"integer {low} {high}", {"type": "integer", "minimum": low, "maximum": high}
        bounds = {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        yield f"integer open {low} {high}", {"type": "integer", **bounds}
    for least_, most_ in ((0.0, 1.0), (-2.5, 2.5)):
        yield f"number {least_}", {"type": "number", "minimum": least_, "maximum": most_}
    for step in (3, 10, 25):
        bounds = {"minimum": 0, "maximum": 10_000}
        yield f"multiple {step}", {"type": "integer", "multipleOf": step, **bounds}
    for least, most in ((0, 0), (0, 5), (3, 3), (4, 9), (0, 40)):
        yield f"text {least} {most}", {"type": "string", "minLength": least, "maxLength": most}
    for index, pattern in enumerate(PATTERNS):
        yield f"pattern {index}", {"type": "string", "pattern": pattern}
    for name in FORMATS:
        yield f"format {name}", {"type": "string", "format": name}
    for name in ("hostname", "email", "uri"):
        yield f"format {name}", {"type": "string", "format": name, "maxLength": 60}
    for index, value in enumerate(
        (1, "x", None, True, [1, "a"], {"a": {"b": [None]}}, '"\\\n', "日本")
    ):
        yield f"const {index}", {"const": value}
    yield "enum mixed", {"enum": ["a", 1, None, False, {"k": 1}]}
    yield "enum texts", {"enum": [f"value {number}" for number in range(50)]}
    yield "enum unicode", {"enum": ["Straße", "naïve", "emoji 🙂", "tab\t"]}
    yield "types", {"type": ["integer", "null", "boolean"]}


def _objects() -> Iterator[tuple[str, Schema]]:
    for depth in range(1, 9):
        schema: Schema = dict(SMALL)
        for level in range(depth):
            schema = record({f"level_{level}": schema})
        yield f"nested {depth}", schema
    for count in (1, 2, 5, 12):
        yield f"required {count}", record({f"p{n}": {"type": "boolean"} for n in range(count)})
        optional = {f"o{n}": {"type": "boolean"} for n in range(count)}
        yield f"optional {count}", record({"id": SMALL}, optional)
    yield "empty object", {"type": "object", "maxProperties": 0}
    yield "map", {"type": "object", "additionalProperties": SMALL, "maxProperties": 2}
    yield (
        "strange names",
        record({'a "quote"': SMALL, "back\\slash": SMALL, "ключ": SMALL, "": SMALL}),
    )
    yield "pattern properties", {
        "type": "object", "patternProperties": {"^x[0-9]$": SMALL}, "additionalProperties": False,
    }  # fmt: skip
    yield "nullable", record({"a": {"anyOf": [WORD, {"type": "null"}]}})
    yield "described", record({"a": {**SMALL, "title": "A", "description": "some", "default": 1}})


def _arrays() -> Iterator[tuple[str, Schema]]:
    for least, most in ((0, 0), (0, 2), (1, 1), (2, 4), (6, 6)):
        yield f"list {least} {most}", array(SMALL, least, most)
        yield f"list of texts {least} {most}", array(WORD, least, most)
        yield f"list of objects {least} {most}", array(record({"a": SMALL}), least, most)
    yield "matrix", array(array({"type": "boolean"}, 3, 3), 3, 3)
    yield "tuple", {"type": "array", "prefixItems": [SMALL, WORD, {"type": "null"}], "items": False,
                    "minItems": 3}  # fmt: skip
    yield "tuple with a rest", {"type": "array", "prefixItems": [WORD], "items": SMALL,
                                "minItems": 1, "maxItems": 4}  # fmt: skip
    yield "list of choices", array({"anyOf": [SMALL, WORD, {"type": "null"}]}, 1, 4)
    yield "list of enums", array({"enum": ["a", "b", "c"]}, 2, 5)


def _references() -> Iterator[tuple[str, Schema]]:
    yield (
        "definition",
        record({"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": SMALL}}),
    )
    yield "old definitions", {"$ref": "#/definitions/w", "definitions": {"w": WORD}}
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5)} | {"d5": WORD}
    yield "chain", {"$ref": "#/$defs/d0", "$defs": chain}
    for width in (1, 2):
        node = record({"value": SMALL}, {"children": array({"$ref": "#/$defs/node"}, 0, width)})
        yield f"tree {width}", {"$ref": "#/$defs/node", "$defs": {"node": node}}
    link = record({"value": SMALL, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}})
    yield "linked list", link
    both = {
        "a": record({}, {"b": {"$ref": "#/$defs/b"}}),
        "b": record({}, {"a": {"$ref": "#/$defs/a"}}),
    }
    yield "mutual", {"$ref": "#/$defs/a", "$defs": both}
    yield "reference with more", {"$ref": "#/$defs/n", "maximum": 10, "$defs": {"n": SMALL}}


def _unions() -> Iterator[tuple[str, Schema]]:
    shapes = [
        record({"kind": {"const": "circle"}, "radius": SMALL}),
        record({"kind": {"const": "square"}, "side": SMALL}),
        record({"kind": {"const": "point"}}),
    ]
    yield "any of", {"anyOf": shapes}
    yield "one of, told apart", {"oneOf": shapes}
    yield "one of, by type", {"oneOf": [SMALL, WORD, {"type": "null"}]}
    yield "all of", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]}
    merged = [{"properties": {"b": WORD}, "required": ["b"]}]
    yield (
        "all of objects",
        {"type": "object", "properties": {"a": SMALL}, "required": ["a"], "allOf": merged},
    )
    yield (
        "nested unions",
        {"anyOf": [{"anyOf": [SMALL, {"type": "null"}]}, array({"anyOf": [WORD, SMALL]})]},
    )
    for count in (2, 8, 20):
        yield f"union of {count}", {"anyOf": [record({f"k{n}": SMALL}) for n in range(count)]}


def _real() -> Iterator[tuple[str, Schema]]:
    date, mail = (
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.com$"},
    )
    line = record({"sku": {"type": "string", "pattern": "^[A-Z]{3}[0-9]{3}$"}, "count": SMALL},
                  {"note": SHORT})  # fmt: skip
    yield (
        "invoice",
        record(
            {
                "number": SMALL,
                "issued": date,
                "lines": array(line, 1, 3),
                "paid": {"type": "boolean"},
            }
        ),
    )
    yield "person", record({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
                           {"mail": mail, "tags": array(WORD, 0, 2)})  # fmt: skip
    call = record(
        {
            "name": {"enum": ["weather", "search"]},
            "arguments": record({"city": SHORT}, {"days": SMALL}),
        }
    )
    yield "tool call", call
    yield "tool calls", array(call, 1, 2)
    place = array({"type": "integer", "minimum": -180, "maximum": 180}, 2, 2)
    yield "point on a map", record({"type": {"const": "Point"}, "coordinates": place})
    yield "sentiment", record({"sentiment": {"enum": ["positive", "negative", "neutral"]},
                               "score": {"type": "number", "minimum": 0, "maximum": 1}})  # fmt: skip
    yield (
        "answer with steps",
        record(
            {"steps": array(record({"thought": SHORT, "result": SHORT}), 1, 2), "answer": SHORT}
        ),
    )


def _random(seed: int) -> Schema:
    """Return a schema composed at random of all that is above."""
    rng = random.Random(seed)
    leaves: list[Schema] = [
        SMALL, WORD, SHORT, {"type": "boolean"}, {"type": "null"}, {"enum": ["on", "off"]}, {"const": 3},
        {"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}, {"$ref": "#/$defs/shared"},
        {"type": "integer", "minimum": -1, "maximum": 1},
    ]  # fmt: skip

    def some(depth: int) -> Schema:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(leaves)
        kind = rng.choice(("object", "object", "list", "union", "tuple"))
        if kind == "list":
            least = rng.randrange(3)
            return array(some(depth - 1), least, least + rng.randrange(3))
        if kind == "union":
            return {"anyOf": [some(depth - 1) for _ in range(rng.randint(2, 3))]}
        if kind == "tuple":
            parts = [some(depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        names = rng.sample(
            ("id", "name", "value", "größe", "is_on", "x y", "list"), rng.randint(1, 4)
        )
        split = rng.randint(0, len(names))
        parts_of = {name: some(depth - 1) for name in names}
        return record(
            {n: parts_of[n] for n in names[:split]}, {n: parts_of[n] for n in names[split:]}
        )

    return {**some(rng.randint(1, 4)), "$defs": {"shared": rng.choice(leaves[:-2])}}


def _all() -> dict[str, Schema]:
    kinds = (_scalars, _objects, _arrays, _references, _unions, _real)
    named = {name: schema for kind in kinds for name, schema in kind()}
    return named | {f"random {seed}": _random(seed) for seed in range(110)}


SCHEMAS = _all()


def faults_of(schema: Schema, text: str) -> list[str]:
    """Return what two independent validators find wrong with an answer; formats are judged by the second."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return [f"no JSON: {error}"]
    checker = jsonschema.Draft202012Validator(schema)
    found = [error.message for error in checker.iter_errors(value)]
    second = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    return found + [error.message for error in second.iter_errors(value)]
