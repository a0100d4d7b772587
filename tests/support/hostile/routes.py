"""Every operation of docs/openapi.yaml with one request that works: what hostile requests are made from.

A route that is added there is attacked by every test here without a change; only a new path parameter or a required
field of a kind not seen before needs a value below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
SPEC: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "openapi.yaml").read_text(encoding="utf-8"))
METHODS = ("get", "post", "put", "patch", "delete")
OPEN = frozenset({"/livez", "/readyz", "/health"})
PUBLIC = OPEN | {"/openapi.json"}  # what needs no key
COLLECTION, DOCUMENT, MODEL, CHAT_MODEL = "mine", "a", "sim", "sim-chat"
TEXT = "water over the dam"
# What stands for a path's parameter, and for a query's value, and names or means nothing.
TRICKS = (
    "..", "%2e%2e", "..%2f..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "..%5c..%5cwin.ini", "%00", "a%00.json",
    "%0d%0aSet-Cookie:x", ".", "%2f", "%252e%252e%252f", "%c0%ae%c0%ae%c0%af", "%ff%fe", "%ed%a0%80", "*", "{name}",
    "~root", "-rf", "search:writes", "%7b0%7d", "a" * 2000, "%f0%9f%92%a9" * 300,
)  # fmt: skip
NONSENSE = (
    b"", b"%ff", b"%00", b"%ed%a0%80", b"-1", b"1e9", b"NaN", b"9" * 30, b"9" * 5000, b"[" * 2000,
    b"%7b%22a%22:" * 300, b"..%2f..%2f", b"%22", b"null", b"0", b"true", b"{}",
    b"x" * 4000, b"%D9%A3",
)  # fmt: skip
# A body that works where the schema alone does not say which.
BODIES: dict[str, Any] = {
    "createCollection": {"name": COLLECTION},
    "search": {"text": TEXT},
    "placeOnMap": {"ids": [DOCUMENT]},
    "storeDocuments": {"documents": [{"id": DOCUMENT, "text": TEXT}]},
    "rerank": {"query": "water", "documents": [TEXT]},
    "rerankAlias": {"query": "water", "texts": [TEXT]},
    "embedTexts": {"inputs": TEXT},
    "rerankV2": {"query": "water", "documents": [TEXT]},
    "tokenize": {"prompt": TEXT},
    "detokenize": {"tokens": [40, 41]},
    "decode": {"ids": [40, 41]},
    "deleteDocuments": {"ids": ["none"]},
    "createChatCompletion": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
    "createCompletion": {"prompt": TEXT, "max_tokens": 4},
    "createResponse": {"input": TEXT, "max_output_tokens": 4},
    "importSession": {"format": "spillway.session/1", "model": CHAT_MODEL, "turns": []},
}
# Ids that only the server can make, by what they are of; `home` sees to it that they exist.
HELD: dict[str, str] = {}


def resolve(node: Any) -> Any:
    """Follow a $ref, and an allOf of one."""
    while isinstance(node, dict):
        if "$ref" in node:
            found: Any = SPEC
            for part in node["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            node = found
        elif len(node.get("allOf", ())) == 1:
            node = {**{k: v for k, v in node.items() if k != "allOf"}, **resolve(node["allOf"][0])}
        else:
            break
    return node


def types(schema: Any) -> set[str]:
    """Return the JSON types a schema takes ("any" if it does not say)."""
    schema = resolve(schema)
    found = {"null"} if schema.get("nullable") else set()
    if "anyOf" in schema:
        return found.union(*(types(part) for part in schema["anyOf"]))
    if schema.get("type") == "number":
        found.add("integer")
    return found | {schema.get("type", "object" if "properties" in schema else "any")}


def sample(schema: Any) -> Any:
    """Return a small value a schema takes."""
    schema = resolve(schema)
    if "anyOf" in schema:
        return sample(schema["anyOf"][0])
    if schema.get("enum"):
        return schema["enum"][0]
    kind = next(iter(types(schema) - {"null"}))
    if kind == "object":
        required = schema.get("required", ())
        return {name: sample(schema["properties"][name]) for name in required}
    if kind == "array":
        return [sample(schema["items"])] * schema.get("minItems", 1)
    plain: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": False}
    return plain.get(kind, TEXT)


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    name: str
    method: str
    template: str
    parameters: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    schema: Any = None
    required: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.template}"

    @property
    def path_parameters(self) -> list[str]:
        return [name for where, name in self.parameters if where == "path"]

    @property
    def query_parameters(self) -> list[str]:
        return [name for where, name in self.parameters if where == "query"]

    def target(self, request: str, **given: str) -> str:
        """Return the path with parameters that work, those given as they are."""
        path = self.template
        for name in self.path_parameters:
            path = path.replace("{" + name + "}", given.get(name) or self._usual(name, request))
        return path

    def _usual(self, name: str, request: str) -> str:
        if name == "id" and "/requests/" in self.template:
            return request
        if name == "id" and "/responses/" in self.template:
            return HELD.get("response", "x")
        if name == "id" and "/sessions/" in self.template:
            return HELD.get("session", "x")
        return {"model": MODEL, "name": COLLECTION, "id": DOCUMENT, "shard": "0"}.get(name, "x")

    @property
    def body(self) -> Any:
        """Return a body that works, None if the operation takes none."""
        if self.schema is None:
            return None
        return BODIES.get(self.name, sample(self.schema))


def _body(operation: Any) -> tuple[Any, bool]:
    body = resolve(operation.get("requestBody") or {})
    content = body.get("content", {}).get("application/json", {})
    return (resolve(content["schema"]) if content else None), bool(body.get("required"))


def operations() -> Iterator[Operation]:
    """Yield every operation."""
    for template, item in SPEC["paths"].items():
        for method in METHODS:
            if method not in item:
                continue
            found = item[method]
            listed = map(resolve, [*item.get("parameters", ()), *found.get("parameters", ())])
            parameters = {(p["in"], p["name"]): p["schema"] for p in listed}
            schema, required = _body(found)
            yield Operation(
                found["operationId"], method.upper(), template, parameters, schema, required
            )


OPERATIONS = list(operations())
GUARDED = [operation for operation in OPERATIONS if operation.template not in PUBLIC]


def fields(operation: Operation) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and schema of every field of an operation's body, those of objects in lists included."""
    if operation.schema is not None:
        yield from _fields((), operation.schema)


def _fields(path: tuple[str, ...], schema: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, raw in resolve(schema).get("properties", {}).items():
        inner = resolve(raw)
        yield (*path, name), inner
        if "properties" in inner:
            yield from _fields((*path, name), inner)
        item = resolve(inner.get("items", {}))
        if "properties" in item:
            yield from _fields((*path, name, "0"), item)


def put(body: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return a copy of a body with one field replaced, and what is needed on the way there made."""
    if not path:
        return value
    first, *rest = path
    if isinstance(body, list):
        return [put(body[0] if body else {}, tuple(rest), value), *body[1:]]
    made = dict(body) if isinstance(body, dict) else {}
    missing: Any = [{}] if rest and rest[0] == "0" else {}
    made[first] = put(made.get(first) or missing, tuple(rest), value)
    return made
