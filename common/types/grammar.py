"""Output grammars in llguidance's notation: their definitions, and the reasons why some cannot be used.

A router refuses a grammar by `fault`, and a worker masks tokens by the same `definition`, so both agree.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from common.types.generation import OutputGrammar

MAX_SOURCE_BYTES = 65_536
# Limits of a hostile grammar: its parts, the states of its lexer (2 kB each), and a mask's work (15 ms on one core).
LIMITS = LLParserLimits(
    max_grammar_size=100_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    verbose_errors=False,
)
# White space between the parts of a JSON text: none, one blank, or a line break with indentation. Without a bound a
# model may write blanks until its answer is cut off.
_WHITESPACE = r"\x20|\n[\x20]{0,24}|\n[\t]{0,8}"
# Dates and times that llguidance's formats allow and validators do not: 29 February in years without one, and leap
# seconds, which most minutes do not have.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:0[13-9]|1[0-2])-[0-3][0-9]"
    f"|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
)
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_FORMATS = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}.{_TIME}"}
_LITERALS = ("const", "enum", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Every token whose text the grammar allows is allowed, not only the token that the tokenizer would choose.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def definition(grammar: OutputGrammar) -> str:
    """Return a grammar in llguidance's own notation; ValueError for a JSON Schema that is no JSON object."""
    if grammar.kind == "lark":
        lark = grammar.source
    elif grammar.kind == "regex":
        lark = f"start: /{regex_to_lark(grammar.source, '')}/"
    else:
        lark = f"start: {json_rule(_schema(grammar.source))}"
    return str(LLMatcher.grammar_from_lark(lark + _OPTIONS))


def _schema(source: str) -> dict[str, Any]:
    schema = json.loads(source)
    if not isinstance(schema, dict):
        raise ValueError("expected a JSON Schema that is an object")
    return schema


def json_rule(schema: dict[str, Any]) -> str:
    """Return the part of a Lark grammar that matches JSON of a schema."""
    strict = {**_with_strict_formats(schema), "x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"%json {json.dumps(strict)}"


def _with_strict_formats(schema: Any) -> Any:
    """Return a schema, or a list of them, that allows only dates and times that there are."""
    if isinstance(schema, list):
        return [_with_strict_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = dict[str, Any]()
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            strict[key] = {name: _with_strict_formats(each) for name, each in value.items()}
        else:
            strict[key] = value if key in _LITERALS else _with_strict_formats(value)
    name, others = strict.get("format"), strict.get("allOf", [])
    if isinstance(name, str) and name in _FORMATS and isinstance(others, list):
        strict["allOf"] = [*others, {"pattern": _FORMATS[name]}]
    return strict


def fault(grammar: OutputGrammar) -> str:
    """Return the reason, in one line, why a grammar cannot be used; "" if it can. Takes up to a few hundred ms."""
    if len(grammar.source.encode()) > MAX_SOURCE_BYTES:
        return f"it is longer than {MAX_SOURCE_BYTES} bytes"
    try:
        text = definition(grammar)
    except (ValueError, RecursionError) as error:
        return _line(str(error))
    failed, notes = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    if failed:
        return _line(notes[0])
    if any("no tokenizer" in note for note in notes):
        return "special tokens and token ids are not allowed in a grammar"
    return unsatisfiable(LLMatcher(_bytes(), text, log_level=0, limits=LIMITS))


def unsatisfiable(matcher: LLMatcher) -> str:
    """Return the reason why no text can begin in a new matcher; "" if one can."""
    allowed = any(matcher.compute_bitmask())
    why = str(matcher.get_error()) if matcher.is_error() else ""
    if why and not why.startswith("NoExtension"):
        return _line(why)
    return "" if not why and (allowed or matcher.is_accepting()) else "no text matches it"


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _line(message: str) -> str:
    """Return the line with the fault of an error message of several lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    shown = [line for line in lines if not set(line) <= set("^ ") and "%llguidance" not in line]
    told = next((line.removeprefix("error: ") for line in shown if line.startswith("error: ")), "")
    first = shown[0] if shown else "it cannot be read"
    return (f"{first} {told}" if told and told not in first else first)[:300]
