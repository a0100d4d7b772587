"""Makes answers of two runs comparable: ids, times, addresses and the pieces of a stream lose what chance gave them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HEADERS = (
    "allow", "cache-control", "content-disposition", "content-type", "retry-after",
    "www-authenticate", "x-accel-buffering", "x-request-id", "x-should-retry",
)  # fmt: skip
# A float may differ by so much, or by this share of itself: another CPU adds in another order.
NEAR, SHARE = 0.01, 0.01
_ID = re.compile(r"(?:[a-z0-9._-]+~\d+~|req-)?(?<![0-9a-z])([0-9a-hjkmnp-tv-z]{26})(?![0-9a-z])")
_WORKER = re.compile(r"\b(?:router|gpu|cpu|search|kv)-[\w.-]+-\d+-[a-z0-9]{10}\b")
_PLAIN = (
    (_WORKER, "<worker>"),
    (re.compile(r"127\.0\.0\.1:\d+"), "<address>"),
    (re.compile(r"\b\d{13}-\d+\b"), "<position>"),
    (re.compile(r"\b\d{5,10}\b"), "<bytes>"),
    (re.compile(r"\bfp_[0-9a-f]{10}\b"), "fp_<fingerprint>"),
)
_SECONDS, _MILLISECONDS = (1.6e9, 4e9), (1.6e12, 4e12)
_HASHES = {"fingerprint": "<fingerprint>", "root": "<root>"}
# Records whose times and positions have more or fewer digits; tokens whose pages were, or were not, fetched in time;
# what a search took, and was predicted to.
_CHANCE = {
    "log_bytes": "<bytes>",
    "cached_tokens": "<tokens>",
    "took_ms": "<milliseconds>",
    "predicted_ms": "<milliseconds>",
    "start_ms": "<milliseconds>",
    "end_ms": "<milliseconds>",
}


class Plain:
    """Plain forms of one answer: an id is numbered by its first use, those the script knows have a name."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known, self._ids = known, dict[str, str]()

    def text(self, text: str) -> str:
        """Return a text without ids, addresses and positions."""
        for found, name in self._known.items():
            text = text.replace(found, f"<{name}>")
        for pattern, name in _PLAIN:
            text = pattern.sub(name, text)
        return _ID.sub(lambda m: self._ids.setdefault(m[1], f"<id{len(self._ids) + 1}>"), text)

    def value(self, value: Any, key: str = "") -> Any:
        """Return a JSON value without what chance gave it."""
        if key in _CHANCE:
            return _CHANCE[key]
        if isinstance(value, dict):
            return {self.text(name): self.value(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, str):
            return _HASHES.get(key) or self.text(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if _SECONDS[0] < value < _SECONDS[1] or _MILLISECONDS[0] < value < _MILLISECONDS[1]:
            return "<time>"
        return round(value, 3) if isinstance(value, float) else value

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that clients rely on."""
        found = {name.lower(): text for name, text in headers.items()}
        kept = {name: self.text(found[name]) for name in HEADERS if name in found}
        if "retry-after" in kept:
            kept["retry-after"] = "<seconds>"
        return kept


def shape(value: Any) -> Any:
    """Return a value's fields and their kinds, of a list the fields of all its items together."""
    if isinstance(value, dict):
        return {name: shape(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [_together([shape(item) for item in value])]
    return {float: "number", int: "number"}.get(type(value), type(value).__name__)


def _together(shapes: list[Any]) -> Any:
    """Return what several shapes have in common: all their fields; null stands beside any other kind."""
    told = [each for each in shapes if each != "NoneType"] or shapes[:1]
    if told and all(isinstance(each, dict) for each in told):
        names = sorted({name for each in told for name in each})
        return {name: _together([each[name] for each in told if name in each]) for name in names}
    if told and all(isinstance(each, list) for each in told):
        return [_together([each[0] for each in told if each[0] is not None])]
    kinds = sorted({json.dumps(each) for each in told})
    return json.loads(kinds[0]) if len(kinds) == 1 else kinds or None


def events(raw: str) -> Iterator[dict[str, str]]:
    """Yield the events of a stream; comments, which only keep it open, are left out."""
    for block in raw.replace("\r\n", "\n").split("\n\n"):
        fields: dict[str, str] = {}
        for line in block.split("\n"):
            name, _, text = line.partition(":")
            if name:
                fields[name] = (fields[name] + "\n" if name in fields else "") + text.removeprefix(
                    " "
                )
        if fields:
            yield fields


def stream(raw: str, plain: Plain) -> dict[str, Any]:
    """Return what a stream said, whatever pieces it came in."""
    head: Any = None
    rest: list[Any] = []
    choices: dict[int, dict[str, Any]] = {}
    ids = []
    for event in events(raw):
        data = _data(event["data"]) if "data" in event else None
        if isinstance(data, dict) and data.get("choices"):
            others = {name: item for name, item in data.items() if name != "choices"}
            head = head or plain.value(others)
            ids += [event["id"]] if "id" in event else []
            for choice in data["choices"]:
                _add(choices.setdefault(choice["index"], {}), choice)
        else:
            kind = {"event": event["event"]} if "event" in event else {}
            rest.append(kind | {"data": plain.value(data)})
    ascending = _ascending(ids)
    told = [plain.value(choices[index]) for index in sorted(choices)]
    return {"head": head, "choices": told, "ids ascend": ascending, "rest": rest}


def _data(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _ascending(ids: Sequence[str]) -> bool:
    numbers = [tuple(map(int, each.split("."))) for each in ids]
    return numbers == sorted(set(numbers))


def _add(whole: dict[str, Any], choice: Mapping[str, Any]) -> None:
    """Add a piece of a choice to what came before."""
    for name, value in {**choice, **choice.get("delta", {})}.items():
        if name in {"delta"} or value is None:
            continue
        before = whole.get(name)
        if name in {"content", "text"}:
            whole[name] = (before or "") + value
        elif name == "logprobs":
            whole[name] = _joined(before or {}, value)
        elif isinstance(value, list):
            whole[name] = (before or []) + value
        else:
            whole[name] = value


def _joined(before: Mapping[str, Any], piece: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (before.get(name) or []) + value if isinstance(value, list) else value
        for name, value in piece.items()
    }


def differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """Yield one line for each place where two plain values differ, floats by more than arithmetic may."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            if name not in old or name not in new:
                word = "is gone, was" if name in old else "is new:"
                yield f"{at}.{name} {word} {_clip(old.get(name, new.get(name)))}"
            else:
                yield from differences(old[name], new[name], f"{at}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{at}[{number}]")
    elif not _same(old, new):
        yield f"{at}: was {_clip(old)}, is {_clip(new)}"


def _same(old: Any, new: Any) -> bool:
    numbers = isinstance(old, int | float) and isinstance(new, int | float)
    if numbers and (isinstance(old, float) or isinstance(new, float)):
        return bool(abs(old - new) <= NEAR + SHARE * abs(old))
    return type(old) is type(new) and bool(old == new)


def _clip(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}…"
