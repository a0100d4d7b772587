"""`spillway chat`: a conversation in the terminal, or one question and its answer."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from spillway_client import ChatCompletion, Passage, Spillway, SpillwayError, json_format

from cli.http import add_server, say, sentence, talk_blocking
from cli.search import add_ranking, mmr_of
from cli.terminal import dim, printable, write
from common.errors import ConfigError

_HELP = "/quit ends, /new starts over, Ctrl-C stops an answer"
_TIMEOUT_S = 600.0
_PASSAGE_LINES = 4
NEW = "new"


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to the chat model, or ask it about a collection",
        description="Talk to the chat model. With PROMPT, or with text piped in, ask once; else until /quit. A"
        " prompt of `-` stands for what is piped in.",
    )
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="ask this, and end")
    parser.add_argument("--collection", metavar="NAME", help="answer from its documents, and cite")
    parser.add_argument("-k", type=int, metavar="N", help="with --collection: how many passages")
    parser.add_argument("--filter", metavar="JSON", help="with --collection: only these documents")
    parser.add_argument(
        "--min-score",
        type=float,
        metavar="S",
        help="with --collection: only passages that score S or more",
    )
    add_ranking(parser, "with --collection: ")
    parser.add_argument(
        "--interval",
        type=_interval,
        metavar="N",
        help="with --collection: search again after every N tokens of the answer: 8 to 64, or auto",
    )
    parser.add_argument(
        "--passages", action="store_true", help="with --collection: print the passages, too"
    )
    parser.add_argument(
        "--session", metavar="ID", help="go on with a session of the server; `new` begins one"
    )
    parser.add_argument("--model", metavar="NAME", help="which model (default: the only one)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--min-tokens", type=int, metavar="N", help="shortest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest")
    parser.add_argument(
        "--schema", metavar="FILE", help="answer in JSON that the JSON Schema in this file allows"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask once, or talk until /quit; 0 = answered."""
    retrieval = _retrieval(args)
    question = _question(args.prompt)
    return talk_blocking(
        args,
        lambda client: Conversation(client, args, retrieval).run(question),
        timeout_s=_TIMEOUT_S,
    )


def _question(words: list[str]) -> str | None:
    """Return the only question of this run; None for a conversation typed by a person."""
    if not words and sys.stdin.isatty():
        return None
    piped = ""
    if not words or "-" in words:
        try:
            piped = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input: {error}; expected a text in UTF-8") from None
    text = " ".join(f"\n{piped}\n" if word == "-" else word for word in words) if words else piped
    if not text.strip():
        raise ConfigError("nothing was asked; expected a PROMPT, or a text piped in")
    return text.strip()


def _retrieval(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the `retrieval` of every question, None without --collection."""
    given: dict[str, Any] = {
        "k": args.k,
        "filter": args.filter,
        "min_score": args.min_score,
        "mode": args.mode,
        "mmr": mmr_of(args),
        "interval": args.interval,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.collection is None:
        if given or args.passages:
            raise ConfigError(
                "-k, --filter, --min-score, --mode, --diversity, --interval and --passages need --collection NAME"
            )
        return None
    if "filter" in given:
        try:
            given["filter"] = json.loads(args.filter)
        except ValueError as error:
            raise ConfigError(
                f"--filter is {args.filter!r}: {error}; expected a JSON object"
            ) from None
    if args.passages:
        given["include_passages"] = True
    return {"collection": args.collection, **given}


def _interval(text: str) -> int | str:
    if text == "auto" or (text.isascii() and text.isdigit() and len(text) < 10):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r}; expected a number of tokens, or auto")


def _format(file: str | None) -> dict[str, Any] | None:
    """Return the response format of a file's JSON Schema; ConfigError if the file holds no schema."""
    if file is None:
        return None
    try:
        schema = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(schema, dict):
            raise ValueError("a JSON Schema is an object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--schema {file}: {error}; expected a file with a JSON Schema") from None
    return json_format(schema)


class Conversation:
    """One conversation: the server remembers it if it has a session, else this process does."""

    def __init__(
        self, client: Spillway, args: argparse.Namespace, retrieval: dict[str, Any] | None
    ) -> None:
        self._client = client
        self._args = args
        self._said: list[dict[str, str]] = []
        self._session = ""
        options = {
            "model": args.model,
            "retrieval": retrieval,
            "max_tokens": args.max_tokens,
            "min_tokens": args.min_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
            "response_format": _format(args.schema),
        }
        self._options = {name: value for name, value in options.items() if value is not None}

    def run(self, question: str | None) -> int:
        """Ask the only question, or ask until the user stops."""
        model = self._model()
        if model is None:
            return say(
                "no chat model is served; `spillway status` shows what runs, and `spillway up --model MODEL`"
                " (a GGUF file, a directory or a hub id) serves one",
                1,
            )
        self._begin(model)
        if question is not None:
            self._ask(question)
            return 0
        grounds = f", answers from `{self._args.collection}`" if self._args.collection else ""
        write(f"{model}{grounds}. {_HELP}.\n")
        return self._talk(model)

    def _model(self) -> str | None:
        """Return the model that will answer; None without a chat model."""
        if self._args.session not in {None, NEW}:
            model: str = self._client.sessions.get(self._args.session).model
            return model
        if self._args.model is not None:
            return str(self._args.model)
        models = self._client.models.list()
        return next((m.id for m in models if m.details.get("kind") == "generate"), None)

    def _begin(self, model: str) -> None:
        """Start over with an empty history, or with a new session if sessions are requested."""
        self._said = []
        fresh = True
        if self._args.session is not None:
            if self._args.session == NEW or self._session:
                self._session = self._client.sessions.create(model=model).id
                print(dim(f"session {self._session}", sys.stderr), file=sys.stderr)
            else:
                self._session = self._args.session
                fresh = self._client.sessions.get(self._session).turns == 0
        if self._args.system and fresh:
            self._said = [{"role": "system", "content": self._args.system}]

    def _talk(self, model: str) -> int:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives input() editing and a history
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                write("\n")
                return 0
            if line in {"/quit", "/exit", "/q"}:
                return 0
            if line == "/new":
                self._begin(model)
            elif line.startswith("/"):
                write(f"{_HELP}\n")
            elif line:
                try:
                    self._ask(line)
                except KeyboardInterrupt:
                    write(dim("\n(stopped)") + "\n")
                except SpillwayError as error:
                    say(sentence(error), 1)

    def _ask(self, question: str) -> None:
        """Ask, print the answer as it comes, and keep both in the history."""
        asked = {"role": "user", "content": question}
        options = dict(self._options)
        if self._session:
            options |= {"session": self._session, "keep_partial": True}
        told: list[str] = []
        try:
            with self._client.chat.completions.stream([*self._said, asked], **options) as stream:
                for piece in stream.texts():
                    told.append(piece)
                    write(printable(piece, lines=True))
                answer = stream.final()
        except (SpillwayError, KeyboardInterrupt):
            if told:
                write("\n")
                self._remember(asked, "".join(told))
            raise
        write("\n")
        for line in sources(answer, shutil.get_terminal_size().columns):
            print(dim(line))
        self._remember(asked, answer.text)

    def _remember(self, asked: dict[str, str], answer: str) -> None:
        if self._session:
            self._said = []
        else:
            self._said += [asked, {"role": "assistant", "content": answer}]


def sources(answer: ChatCompletion, width: int) -> list[str]:
    """Return the lines under a grounded answer: the cited passages, or all its passages if it cites none."""
    if answer.retrieval is None or not answer.passages:
        return []
    with_text = any(passage.text is not None for passage in answer.passages)
    cited = {citation.index for citation in answer.citations}
    lines = [""]
    if not cited:
        lines.append("  (it cites none of the passages it was given)")
    for passage in answer.passages:
        if passage.index in cited or not cited or with_text:
            lines += _source(passage, width)
    return lines


def _source(passage: Passage, width: int) -> list[str]:
    where = f"{passage.document_id}:{passage.start}-{passage.end}"
    if passage.page:
        last = passage.page + len(passage.page_starts)
        where += f" page {passage.page}" + (f"-{last}" if last > passage.page else "")
    text = textwrap.wrap(
        " ".join((passage.text or "").split()),
        width=min(width, 100),
        initial_indent="      ",
        subsequent_indent="      ",
        max_lines=_PASSAGE_LINES,
        placeholder=" …",
    )
    return [
        printable(line) for line in (f"  [{passage.index}] {where}  {passage.score:.3f}", *text)
    ]
