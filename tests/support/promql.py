"""As much of PromQL as tells which metrics and labels an expression asks for, and whether it can be one at all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>"(?:[^"\\]|\\.)*")
  | (?P<range>\[\w+(?::\w*)?\])
  | (?P<number>\d+(?:\.\d+)?)
  | (?P<name>[a-zA-Z_:][\w:]*)
  | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},])
    )""",
    re.VERBOSE,
)
FUNCTIONS = {"rate", "increase", "histogram_quantile", "absent"}
GROUPED = {"sum", "max", "min", "count", "avg"}
CLAUSES = {"by", "on", "without", "ignoring"}
OPERATORS = {"and", "or", "unless"}
CLOSES = {"(": ")", "{": "}"}


@dataclass
class Selector:
    """One metric as an expression asks for it: its matchers, and the labels the result is grouped by."""

    metric: str
    matchers: list[tuple[str, str, str]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)

    def matches(self, labels: dict[str, str]) -> bool:
        """Return whether a series is meant."""
        return all(_holds(labels.get(name, ""), how, value) for name, how, value in self.matchers)

    @property
    def names(self) -> set[str]:
        """Every label it relies on."""
        return self.grouped | {name for name, _, _ in self.matchers}


def _holds(found: str, how: str, value: str) -> bool:
    same = re.fullmatch(value, found) is not None if "~" in how else found == value
    return same != how.startswith("!")


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 20]!r} in {text!r}")
        found.append((str(match.lastgroup), match[0].strip()))
        at = match.end()
    return found


def selectors(text: str) -> list[Selector]:
    """Return what an expression asks for; ValueError for what no expression is.

    `by` clauses stand before what they group, and hold for every selector within.
    """
    tokens = _tokens(text)
    found: list[Selector] = []
    open_: list[tuple[str, set[str]]] = []
    pending: set[str] = set()
    at = 0
    while at < len(tokens):
        kind, word = tokens[at]
        after = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind == "name" and word in CLAUSES:
            end = tokens.index(("sign", ")"), at)
            labels = {name for what, name in tokens[at + 2 : end] if what == "name"}
            if word == "by":
                pending = labels
            else:
                for one in found:
                    one.grouped |= labels
            at = end
        elif kind == "name" and word in FUNCTIONS | GROUPED and after in {"(", "by"}:
            pass
        elif kind == "name" and word not in OPERATORS:
            if after == "(":
                raise ValueError(f"unknown function {word} in {text!r}")
            one = Selector(word, [], set().union(*(labels for _, labels in open_)))
            if after == "{":
                end = tokens.index(("sign", "}"), at)
                inside = [t for t in tokens[at + 2 : end] if t != ("sign", ",")]
                for label, how, value in zip(*[iter(inside)] * 3, strict=True):
                    one.matchers.append((label[1], how[1], value[1][1:-1]))
                at = end
            found.append(one)
        elif word in CLOSES:
            open_.append((CLOSES[word], pending))
            pending = set()
        elif word in CLOSES.values() and (not open_ or open_.pop()[0] != word):
            raise ValueError(f"{word} closes nothing in {text!r}")
        at += 1
    if open_ or not found:
        raise ValueError(f"not an expression: {text!r}")
    return found
