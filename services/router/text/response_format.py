"""The `response_format` of a generation, in OpenAI's shapes and two more, turned into a checked grammar."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from common.errors import InvalidRequest
from common.types.generation import OutputGrammar
from common.types.grammar import fault

ANY_OBJECT = OutputGrammar("json_schema", '{"type":"object"}')


class SchemaFormat(Struct, frozen=True):
    """The `json_schema` of a response format: a name, which is not read, and the schema itself."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """The form that an answer must have: any text, any JSON object, or text that a schema, regex or grammar allows."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: SchemaFormat | None = None
    regex: str | None = None
    grammar: str | None = None


def grammar_of(form: ResponseFormat | None) -> OutputGrammar | None:
    """Return the grammar of a response format, None for any text; InvalidRequest if a part is missing or unusable."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ANY_OBJECT
    if form.type == "json_schema":
        schema = form.json_schema and form.json_schema.schema
        if schema is None:
            raise _missing("json_schema.schema", "a JSON Schema")
        return checked(OutputGrammar("json_schema", msgspec.json.encode(schema).decode()))
    if form.type == "regex":
        if form.regex is None:
            raise _missing("regex", "a regular expression")
        return checked(OutputGrammar("regex", form.regex))
    if form.grammar is None:
        raise _missing("grammar", "a grammar in Lark's notation")
    return checked(OutputGrammar("lark", form.grammar))


def checked(grammar: OutputGrammar, param: str = "response_format") -> OutputGrammar:
    """Return the grammar; InvalidRequest `invalid_grammar`, with the reason, if no worker could use it."""
    if why := fault(grammar):
        kind = {"json_schema": "JSON Schema", "regex": "regular expression", "lark": "grammar"}
        raise InvalidRequest(
            f"{param}: the {kind[grammar.kind]} cannot be used: {why}",
            code="invalid_grammar",
            param=param,
        )
    return grammar


def _missing(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"response_format.{field} is missing: expected {what}",
        code="invalid_value",
        param="response_format",
    )
