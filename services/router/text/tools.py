"""Tools of a chat in OpenAI's form: their rendering by the chat template, and the grammar that binds the answer.

A model writes calls in its own format, which its chat template shows. `auto` leaves the answer to the model; if calls
are required, strict or not parallel, a grammar of that format binds the answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from common.errors import InvalidRequest
from common.types.generation import OutputGrammar
from common.types.grammar import MAX_SOURCE_BYTES, json_rule
from common.wire.workflows import ToolFormat
from services.router.responses.tool_calls import CLOSE, MARKS, THINK, THOUGHT
from services.router.text.response_format import checked
from services.router.text.tokens import TextEncoder

MAX_TOOLS = 128
MOST_LEVELS = 100  # of parameters and arguments
MOST_CALLS = 8  # of an answer bound by a grammar, so that it ends
ID = re.compile(r"[A-Za-z0-9]{9}")
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
# Marks in the templates of models whose format of calls the router cannot read.
_OTHERS = ("<function=", "<arg_key>", "<|tool▁call▁begin|>")


class FunctionBody(Struct, frozen=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Struct, frozen=True):
    """A tool of a request; functions are the only kind."""

    type: Literal["function"]
    function: FunctionBody


class CalledFunction(Struct, frozen=True):
    """The function of a call in a conversation: `arguments` is a JSON object, written out."""

    name: FunctionName
    arguments: str = "{}"


class ToolCallBody(Struct, frozen=True):
    """A call that an assistant's message made."""

    id: Annotated[str, Meta(min_length=1, max_length=200)]
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolWish(NamedTuple):
    """The tools that a request's `tool_choice` allows; `required` if the answer must be calls."""

    functions: Sequence[FunctionBody]
    required: bool
    parallel: bool

    @property
    def bound(self) -> bool:
        """True if a grammar must bind the answer: calls are required, not parallel, or strict."""
        return self.required or not self.parallel or any(each.strict for each in self.functions)


def wish_of(
    tools: Sequence[ToolBody] | None, choice: Any, *, parallel: bool | None
) -> ToolWish | None:
    """Return the tools that an answer may call; None if it may call none."""
    functions = [tool.function for tool in tools or ()]
    names = [each.name for each in functions]
    for each in functions:
        _check_depth(each.parameters, f"tools: the parameters of {each.name} are", "tools")
    if len(set(names)) < len(names):
        raise _invalid("tools", "two functions have the same name")
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        if choice.get("type") != "function" or name not in names:
            raise _invalid("tool_choice", "expected one of the functions in tools")
        return ToolWish(
            [each for each in functions if each.name == name], required=True, parallel=False
        )
    if choice not in (None, "none", "auto", "required"):
        raise _invalid("tool_choice", "expected none, auto, required or a function")
    if choice == "none" or (not functions and choice != "required"):
        return None
    if not functions:
        raise _invalid("tool_choice", "expected tools to choose from")
    return ToolWish(functions, choice == "required", parallel=parallel is not False)


def format_of(template: str) -> ToolFormat | None:
    """Return the format in which a model of this chat template writes its calls; None if it knows no tools."""
    if "tools" not in template or any(mark in template for mark in _OTHERS):
        return None
    for form in ("mistral", "hermes"):
        if MARKS[form] in template:
            return form
    return "llama" if MARKS["llama"] in template or '"parameters"' in template else None


def reasons(template: str) -> bool:
    """True if a model of this chat template writes its reasoning between marks."""
    return THOUGHT in template


def shown_ids(encoder: TextEncoder, form: ToolFormat | None, *, reasoning: bool) -> list[int]:
    """Return the ids of the marks that are special tokens of the model and must be shown in its answer."""
    marks = [MARKS[form], CLOSE, "[ARGS]", "[CALL_ID]"] if form is not None else []
    return encoder.special_ids([*marks, THINK, THOUGHT] if reasoning else marks)


def rendered(functions: Sequence[FunctionBody]) -> list[dict[str, Any]]:
    """Return tools in the form that templates take."""
    return [
        {
            "type": "function",
            "function": {
                "name": each.name,
                "description": each.description or "",
                "parameters": each.parameters or _EMPTY,
            },
        }
        for each in functions
    ]


def bound(wish: ToolWish, form: ToolFormat, encoder: TextEncoder) -> OutputGrammar:
    """Return the grammar of an answer's calls; InvalidRequest `invalid_grammar` if parameters cannot be used."""
    schemas = [json.dumps(_parameters(wish, each)) for each in wish.functions]
    if sum(map(len, schemas)) > MAX_SOURCE_BYTES:
        raise InvalidRequest(
            f"tools: their parameters are longer than {MAX_SOURCE_BYTES} bytes together",
            code="invalid_grammar",
            param="tools",
        )
    for schema in schemas:
        checked(OutputGrammar("json_schema", schema), "tools")
    key = "parameters" if form == "llama" else "arguments"
    # Llama's templates refuse conversations in which a message has more than one call.
    more = MOST_CALLS - 1 if wish.parallel and form != "llama" else 0
    mark, close = _mark(MARKS[form], encoder), _mark(CLOSE, encoder)
    rules: list[str]
    if form == "hermes":
        rules = [
            "calls: call" + _again('"\\n" call', more),
            f'call: {mark} "\\n" value "\\n" {close}',
        ]
    elif form == "llama":
        rules = ["calls: value"]
    else:
        rules = [f'calls: {mark} "[" value' + _again('", " value', more) + ' "]"']
    if wish.required:
        rules.insert(0, "start: calls")
    elif form == "llama":
        rules[:0] = ["start: text | calls", r"text: /([^{\s](?s:.*))?/"]
    elif mark.startswith("<["):
        rules[:0] = ["start: text calls?", r"text: /(?s:.*)/"]
    else:
        rules[:0] = [
            "start: TEXT calls?",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){re.escape(MARKS[form])}(?s:.*)/",
        ]
    rules.append("value: " + " | ".join(f"value_{at}" for at in range(len(wish.functions))))
    for at, each in enumerate(wish.functions):
        head = json.dumps(f'{{"name": "{each.name}", "{key}": ')
        rules += [
            f'value_{at}: {head} json_{at} "}}"',
            f"json_{at}: {json_rule(_parameters(wish, each))}",
        ]
    return OutputGrammar("lark", "\n".join(rules))


_EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


def _parameters(wish: ToolWish, each: FunctionBody) -> dict[str, Any]:
    """Return the schema that binds a function's arguments: its own if required or strict, else any object."""
    if wish.required or each.strict:
        nothing = {**_EMPTY, "additionalProperties": False}
        return {"type": "object", **(each.parameters or nothing)}
    return {"type": "object"}


def _again(what: str, most: int) -> str:
    """Return the grammar's text for `what`, repeated at most `most` times."""
    return f" ({what}){{0,{most}}}" if most else ""


def _mark(text: str, encoder: TextEncoder) -> str:
    """Return the grammar's text for a mark: its special token if the mark is one, else a string."""
    ids = encoder.special_ids([text])
    return f"<[{ids[0]}]>" if ids else json.dumps(text)


def templated_calls(calls: Sequence[ToolCallBody], where: str) -> list[dict[str, Any]]:
    """Return the calls of a message as templates take them: arguments as objects."""
    found = []
    for at, call in enumerate(calls):
        try:
            arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise _invalid(
                f"{where}.tool_calls[{at}].function.arguments", "expected a JSON object as a text"
            ) from None
        _check_depth(arguments, f"{where}: the arguments of {call.function.name} are", "messages")
        function = {"name": call.function.name, "arguments": arguments}
        found.append({"id": short_id(call.id), "type": "function", "function": function})
    return found


def short_id(given: str) -> str:
    """Return an id of nine letters and digits, which every template takes; an id of that form is unchanged."""
    if ID.fullmatch(given):
        return given
    return hashlib.blake2b(given.encode(), digest_size=16).hexdigest()[:9]


def _check_depth(value: object, what: str, param: str) -> None:
    """Refuse JSON of more than MOST_LEVELS levels, which templates would write out."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [
            one
            for each in inner
            if isinstance(each, Iterable) and not isinstance(each, str)
            for one in each
        ]
        if not level:
            return
    raise InvalidRequest(
        f"{what} nested too deeply: at most {MOST_LEVELS} levels are allowed",
        code="too_deep",
        param=param,
    )


def _invalid(param: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {expected}", code="invalid_value", param=param)
