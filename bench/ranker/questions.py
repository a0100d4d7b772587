"""Questions as users ask them, made by templates of a page's sentences.

Each question is of one of three kinds: what the page is about, a detail of it, or a follow-up, in which a detail is
asked for without the page's name, after a turn that named it, as `retrieval.rewrite`'s rule joins them.
"""

from __future__ import annotations

import random
import re
from typing import Literal, NamedTuple

from bench.ranker.pages import TextPage

Kind = Literal["about", "detail", "follow-up"]

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])|\n\s*\n")
_MARKUP = re.compile(r"[`*]|:\w+:|<[^>]+>")
_VERB = re.compile(r"\A([A-Za-z]+) (.+)\Z")
_VERBS = frozenset(
    {
        "add", "allow", "append", "apply", "assert", "attach", "bind", "build", "calculate", "call", "cancel", "change",
        "check", "choose", "clear", "close", "combine", "compare", "compile", "compute", "configure", "connect",
        "construct", "convert", "copy", "count", "create", "cut", "decode", "define", "delete", "determine", "disable",
        "discard", "display", "divide", "draw", "drop", "dump", "emit", "enable", "encode", "encrypt", "ensure",
        "escape", "estimate", "evaluate", "execute", "expand", "extend", "extract", "fetch", "fill", "filter", "find",
        "fit", "flush", "format", "generate", "get", "give", "group", "handle", "hash", "increment", "initialize",
        "insert", "install", "invoke", "iterate", "join", "limit", "list", "load", "locate", "log", "look", "make",
        "map", "mark", "match", "measure", "merge", "move", "normalize", "open", "parse", "perform", "place", "plot",
        "pop", "predict", "prepare", "prevent", "print", "process", "produce", "provide", "publish", "put", "raise",
        "read", "receive", "record", "reduce", "register", "release", "remove", "rename", "render", "replace",
        "represent", "request", "reset", "resize", "resolve", "restore", "retrieve", "return", "reverse", "rotate",
        "round", "run", "sample", "save", "scale", "scan", "search", "select", "send", "serialize", "set", "show",
        "shuffle", "skip", "solve", "sort", "split", "start", "stop", "store", "subscribe", "sum", "swap", "take",
        "tell", "test", "transform", "traverse", "translate", "trim", "truncate", "try", "turn", "update", "upload",
        "use", "validate", "verify", "wait", "wrap", "write", "yield",
    }
)  # fmt: skip
_NO_PARAMETERS = frozenset(
    {
        "args", "arguments", "example", "examples", "note", "notes", "otherwise", "parameters", "raises", "return",
        "returns", "rtype", "see", "true", "type", "warning", "http", "https", "default", "references", "usage",
        "keyword",
    }
)  # fmt: skip
_IF = re.compile(r"\A(?:If|When) ([^,]{8,90}), ")
_IS = re.compile(
    r"\A(The|A|An|This|These|All|It)? ?((?:[\w.-]+ ){1,5}?)(is|are|can|must|will|should|may|cannot) (.{6,90}?)[.;,(]"
)
_PARAMETER = re.compile(
    r"^ {0,8}:?(?:param )?(\w{3,24}) ?(?:: ?|\([^)]{2,40}\): ?|--)", re.MULTILINE
)
_OTHER_WORDS = {
    "return": ("get", "obtain", "find"), "compute": ("calculate", "work out", "get"), "create": ("make", "build"),
    "remove": ("delete", "drop", "get rid of"), "delete": ("remove",), "get": ("find", "obtain", "read"),
    "set": ("change", "choose"), "check": ("test", "find out"), "convert": ("turn", "change"), "add": ("append", "put"),
    "raise": ("throw", "get"), "raised": ("thrown",), "list": ("array", "sequence"), "array": ("list",),
    "string": ("text",), "dictionary": ("dict", "mapping"), "dict": ("dictionary",), "function": ("callable",),
    "error": ("exception", "failure"), "exception": ("error",), "call": ("invoke", "run"), "start": ("begin", "launch"),
    "stop": ("end", "finish"), "write": ("save", "store"), "read": ("load",), "load": ("read", "open"),
    "file": ("document",),
    "directory": ("folder",), "path": ("location",), "number": ("count",), "size": ("length",), "given": ("specified",),
    "specified": ("given", "chosen"), "multiple": ("several",), "large": ("big",), "draw": ("plot", "show"),
    "display": ("show",), "show": ("display",), "print": ("show", "output"), "estimate": ("guess", "compute"),
    "generate": ("make", "produce"), "parse": ("read", "analyse"), "value": ("result",), "parameter": ("argument",),
    "argument": ("parameter",), "element": ("item",), "elements": ("items",), "items": ("elements",), "new": ("fresh",),
    "match": ("fit",), "send": ("submit",), "update": ("change",), "wait": ("block",), "allow": ("permit", "let"),
    "ignored": ("left out", "skipped"), "contains": ("has", "holds"), "equal": ("same",), "same": ("equal",),
}  # fmt: skip


class Question(NamedTuple):
    """A question about a page, its kind, and the sentence of the page that it was made of."""

    kind: Kind
    text: str
    source: str


def asked(page: TextPage, shown: str, draw: random.Random) -> Question | None:
    """Return a question that the page's part `shown` answers, None where no template fits.

    Words are replaced by others of like meaning, or left out, so that matching words alone does not find the page.
    """
    about = _about(page, draw)
    details = _details(shown.removeprefix(page.name), _plain(_first(page)))
    kind: Kind = draw.choices(("about", "detail", "follow-up"), (0.3, 0.35, 0.35))[0]
    if kind == "about" or not details:
        opens = shown.startswith(page.name)
        return Question("about", _reworded(about[0], draw), about[1]) if about and opens else None
    detail, source = draw.choice(details)
    detail = _reworded(detail, draw)
    if kind == "detail" or not about:
        return Question("detail", _named(detail, page, draw), source)
    answer = f"{_short(page.name)}: {_plain(_first(page))}"[:200]
    first = _reworded(about[0], draw)
    return Question("follow-up", f"{detail} {first} {answer}", source)


def words_of(name: str) -> str:
    """Return the last part of a dotted name as words: `read_csv` is "read csv"."""
    last = name.rpartition(".")[2]
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", last.replace("_", " "))
    return spaced.lower()


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _first(page: TextPage) -> str:
    return " ".join(_SENTENCE.split(page.text.strip())[0].split())


def _plain(text: str) -> str:
    return " ".join(_MARKUP.sub("", text).split())


def _lower(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def _about(page: TextPage, draw: random.Random) -> tuple[str, str] | None:
    """Return a question of what a page is about, and the sentence that it was made of."""
    sentence = _first(page)
    plain = _plain(sentence).rstrip(".: ")[:120]
    if ": " in page.name:
        heading = page.name.partition(": ")[2]
        return draw.choice(
            (f"How does {heading.lower()} work?", f"{heading}", f"What about {heading.lower()}?")
        ), sentence
    match = _VERB.match(plain)
    verb = _infinitive(match[1]) if match else ""
    if match and verb and len(match[2]) > 8:
        phrase = f"{verb} {match[2]}"
        form = draw.choice(
            (
                "How do I {}?",
                "How can I {}?",
                "How to {}",
                "Which function can {}?",
                "I want to {}.",
                "{}",
            )
        )
        return form.format(phrase), sentence
    if len(plain) < 12:
        return None
    return draw.choice(
        (f"What is there for {_lower(plain)}?", f"Which class is {_lower(plain)}?", plain)
    ), sentence


def _infinitive(word: str) -> str:
    """Return the plain form of a verb such as "Returns", "Matches" or "Return"; "" for another word."""
    low = word.lower()
    forms = (low, low.removesuffix("s"), low.removesuffix("es"))
    return next((form for form in forms if form in _VERBS), "")


def _details(shown: str, first: str) -> list[tuple[str, str]]:
    """Return questions of details that a part of a page answers, each with the sentence that it was made of.

    The page's `first` sentence tells what it is about, and makes no detail.
    """
    found = []
    for raw in _SENTENCE.split(shown):
        sentence = _plain(raw)
        if sentence[:40] == first[:40]:
            continue
        if match := _IF.match(sentence):
            found.append((f"What happens if {_lower(match[1])}?", raw))
        elif match := _IS.match(sentence):
            subject = f"{match[1] or ''} {match[2]}".strip().lower()
            helper = "can" if match[3] == "cannot" else match[3]
            found.append((f"{helper.capitalize()} {subject} {match[4]}?", raw))
        elif 30 < len(sentence) < 140 and " " in sentence and sentence.endswith("."):
            found.append((f"{_lower(sentence.rstrip('.'))}?", raw))
    for match in _PARAMETER.finditer(shown):
        if match[1].lower() in _NO_PARAMETERS:
            continue
        told = _plain(shown[match.end() : match.end() + 140]).rpartition(" ")[0]
        if len(told) > 25:
            some = " ".join(told.split()[:7])
            found.append(
                (f"How do I set the {match[1].replace('_', ' ')}, {_lower(some)}?", match[0])
            )
    return found


def _named(detail: str, page: TextPage, draw: random.Random) -> str:
    name = draw.choice((page.name, _short(page.name), words_of(page.name)))
    return draw.choice(
        (f"{detail} ({name})", f"With {name}: {detail}", f"{name}: {detail}", detail)
    )


def _reworded(text: str, draw: random.Random) -> str:
    """Return a text with some words replaced by others of like meaning, and some left out."""
    said = []
    for word in text.split():
        bare = word.strip("?.,").lower()
        others = _OTHER_WORDS.get(bare)
        if others and draw.random() < 0.5:
            said.append(word.lower().replace(bare, draw.choice(others)))
        elif draw.random() > 0.07:
            said.append(word)
    return " ".join(said) or text
