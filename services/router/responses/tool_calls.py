"""Tool calls and reasoning in the text of an answer, read as the text comes.

The result does not depend on the borders of the pieces. A call is reported as a whole, once it is complete; text that
only looks like a call (broken JSON, an unknown name, an early end) is unchanged content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.wire.workflows import ToolFormat

THINK, THOUGHT = "<think>", "</think>"
# The marks before and after the calls of each format, and the beginning of an answer that is a call without a mark.
MARKS: dict[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "llama": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
}
CLOSE = "</tool_call>"  # the mark after a call of hermes
_BARE: dict[ToolFormat, str] = {"hermes": "", "llama": "{", "mistral": "[{"}
# Mistral's later format of a call: a name, an optional id, and the object of arguments.
_NAMED = re.compile(
    r"\s{0,8}([A-Za-z0-9_-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?(?:\[ARGS\])?\s{0,8}(?=\{)"
)
_MOST_BEFORE = 256  # characters of a name and an id
_BETWEEN = " \n\t\r;,"  # characters between the calls of llama


class ToolCall(NamedTuple):
    """A call of a function: its name, and its arguments as a JSON object."""

    name: str
    arguments: str


class Gained(NamedTuple):
    """The content, calls and reasoning that a piece of an answer's text has made certain."""

    content: str = ""
    calls: Sequence[ToolCall] = ()
    reasoning: str = ""


class ReasoningSplitter:
    """Separates the reasoning between marks at an answer's beginning from the content after it."""

    def __init__(self, *, opened: bool) -> None:
        """`opened` means that the prompt ended with the first mark."""
        self._state = "inside" if opened else "before"
        self._held = ""
        self._said = False

    def push(self, text: str, *, end: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that are certain now."""
        if self._state == "after":
            return "", text
        self._held += text
        if self._state == "before":
            begin = self._held.lstrip()
            if begin.startswith(THINK):
                self._state, self._held = "inside", begin[len(THINK) :]
            elif THINK.startswith(begin) and not end:
                return "", ""
            else:
                self._state = "after"
        if self._state == "inside":
            return self._inside(end=end)
        if self._state == "gap":
            return "", self._gap(end=end)
        content, self._held = self._held, ""
        return "", content

    def _inside(self, *, end: bool) -> tuple[str, str]:
        text, mark, rest = self._held.partition(THOUGHT)
        if mark:
            self._state, self._held = "gap", rest
            return self._thought(text.rstrip("\n")), self._gap(end=end)
        keep = 0 if end else max(_overlap(text, THOUGHT), 0)
        sure = text[: len(text) - keep].rstrip("\n")
        self._held = text[len(sure) :] if not end else ""
        return self._thought(sure), ""

    def _thought(self, text: str) -> str:
        text = text if self._said else text.lstrip("\n")
        self._said = self._said or bool(text)
        return text

    def _gap(self, *, end: bool) -> str:
        """Return the content after the line breaks that follow the reasoning."""
        content = self._held.lstrip("\n")
        self._held = ""
        if content or end:
            self._state = "after"
        return content


class ToolCallParser:
    """Reads the calls of one choice, in a model's own format; only functions in `names` can be called."""

    def __init__(self, form: ToolFormat, names: Sequence[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._mark, self._bare = MARKS[form], _BARE[form]
        self._held = ""  # text that is not decided yet
        self._raw = ""  # reported neither as content nor as a call, but perhaps a call
        self._state = "text"
        self._scan = _Scan()
        self._name = ""  # the function in Mistral's later format
        self._begun = False  # content or a call was reported
        self._called = False  # a call was reported last
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str, *, end: bool = False) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are certain now; with `end` no text follows."""
        self._held += text
        while self._step(end=end):
            pass
        if end:
            self._tell(self._raw + self._held)
            self._raw = self._held = ""
        told = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return told

    def _step(self, *, end: bool) -> bool:
        """Decide a part of the held text; False if more text is needed."""
        if self._state == "text":
            return self._in_text(end=end)
        if self._state == "head":
            return self._in_head()
        if self._state == "value":
            return self._in_value()
        return self._in_tail(end=end)

    def _in_text(self, *, end: bool) -> bool:
        begin = self._held.lstrip()
        if self._bare and not self._begun:
            if begin.startswith(self._bare):
                self._open(len(self._held) - len(begin))
                return True
            if self._bare.startswith(begin) and not end:
                return False
        at = self._held.find(self._mark)
        if at >= 0:
            before = self._held[:at]
            said = before.rstrip()
            self._tell(said)
            self._held = self._held[len(said) :]
            self._open(len(before) - len(said) + len(self._mark))
            return True
        keep = 0 if end else _overlap(self._held, self._mark)
        sure = self._held[: len(self._held) - keep].rstrip()
        self._tell(sure)
        self._held = self._held[len(sure) :]
        return False

    def _open(self, length: int) -> None:
        """Go from text to a call; the first `length` held characters come before the call's value."""
        self._raw += self._held[:length]
        self._held = self._held[length:]
        self._state, self._name = "head", ""

    def _in_head(self) -> bool:
        """Find where the JSON of a call begins."""
        begin = self._held.lstrip()
        if not begin:
            return False
        opening = "{[" if self._form == "mistral" else "{"
        if begin[0] in opening and not (self._form == "mistral" and begin[0] == "{"):
            self._enter(len(self._held) - len(begin))
            return True
        if self._form == "mistral" and (named := _NAMED.match(self._held)):
            self._name = named[1]
            self._enter(named.end())
            return True
        if self._form == "mistral" and "{" not in begin and len(begin) <= _MOST_BEFORE:
            return False
        return self._give_up()

    def _enter(self, length: int) -> None:
        self._raw += self._held[:length]
        self._held = self._held[length:]
        self._scan, self._state = _Scan(), "value"

    def _in_value(self) -> bool:
        end = self._scan.end(self._held)
        if end is None:
            return False
        value, self._held = self._held[:end], self._held[end:]
        self._raw += value
        calls = self._calls_of(value)
        if not calls:
            return self._give_up()
        self._calls += calls
        self._raw, self._begun, self._called = "", True, True
        self._state = {"hermes": "close", "llama": "between", "mistral": "text"}[self._form]
        return True

    def _in_tail(self, *, end: bool) -> bool:
        """Skip the text after a call: its closing mark, or the characters before the next call."""
        if self._state == "between":
            begin = self._held.lstrip(_BETWEEN)
            if not begin and not end:
                return False
            if begin.startswith("{"):
                self._open(len(self._held) - len(begin))
                return True
        else:
            begin = self._held.lstrip()
            if CLOSE.startswith(begin) and begin != CLOSE and not end:
                return False
            if begin.startswith(CLOSE):
                self._held = begin[len(CLOSE) :]
        self._state = "text"
        return True

    def _give_up(self) -> bool:
        """Report text that proved to be no call as content."""
        self._tell(self._raw)
        self._raw, self._state = "", "text"
        return True

    def _tell(self, text: str) -> None:
        blank = not text.strip()
        if blank and (self._called or not self._begun):
            return
        self._content.append(text)
        self._begun, self._called = True, self._called and blank

    def _calls_of(self, text: str) -> list[ToolCall]:
        """Return the calls in a complete JSON text; none if the text is anything else."""
        try:
            value = json.loads(text)
            if self._name:
                value = {"name": self._name, "arguments": value}
            found = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        except (ValueError, RecursionError):
            return []
        return [each for each in found if each is not None] if None not in found else []

    def _call(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some models write the object as a text
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


class _Scan:
    """Finds the end of a JSON object or list in a text that grows at its end."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Return the length of the value that `text` begins with; None while it is not complete."""
        for at in range(self._at, len(text)):
            letter = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._at = len(text)
        return None


class AnswerReader:
    """Reads one choice's text: its reasoning, its content and its calls."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: ToolCallParser | None) -> None:
        self._splitter, self._parser = splitter, parser

    def read(self, text: str, *, end: bool) -> Gained:
        """Return the content, calls and reasoning that a piece of text makes certain; `end` marks the last piece."""
        reasoning, calls = "", list[ToolCall]()
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text, end=end)
        if self._parser is not None:
            text, calls = self._parser.push(text, end=end)
        return Gained(text, calls, reasoning)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper beginning of `mark` that `text` ends with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
