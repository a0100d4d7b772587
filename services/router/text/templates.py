"""Chat templates: a model's own jinja2 template, rendered in a sandbox, within bounds of time and size.

`Template.segments` separates clients' texts from the template's: only the template may write special tokens.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import multiprocessing
import re
import signal
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import ext, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest, Unavailable
from services.router.text.overflow import CHARACTERS_PER_TOKEN, overflow

RENDER_S = 1.5  # of processor time
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]


class PromptSegment(NamedTuple):
    """A piece of a rendered prompt; a piece `written` by a client holds no special token."""

    text: str
    written: bool = False


class _Generation(ext.Extension):
    """`{% generation %}` marks answers for training; here its body is rendered like any other."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return dt.datetime.now().strftime(form)  # noqa: DTZ005 - templates state the server's date, as elsewhere


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=32)
def _compiled(fingerprint: str, source: str) -> jinja2.Template:  # noqa: ARG001 - a model's template is its own
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


@contextlib.contextmanager
def bounded_time() -> Iterator[None]:
    """End this process, if it belongs to the pool, once the block has used more than RENDER_S of processor time.

    The timer's signal, SIGPROF, ends a process by default, even within C code that never returns.
    """
    if multiprocessing.parent_process() is None:
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _broken(why: str) -> Unavailable:
    return Unavailable(f"the model's chat template cannot be used: {why}", code="template_broken")


def late() -> Unavailable:
    """Return the error of a template that used up its time, which ended its process."""
    return _broken(f"it ran for more than {RENDER_S:g} s")


class Template(NamedTuple):
    """A model's chat template with the texts of its special tokens; `most` bounds a prompt's characters.

    `tools` are the functions that the model may call, in OpenAI's form.
    """

    fingerprint: str
    source: str
    bos: str
    eos: str
    most: int
    tools: Tools = ()

    def render(self, messages: Messages) -> str:
        """Return the prompt of `messages`, ready for the answer.

        InvalidRequest `invalid_messages` where the template refuses them, `context_length_exceeded` over `most`
        characters; Unavailable `template_broken` where the template itself cannot be used.
        """
        if not self.source:
            raise InvalidRequest(
                "the model has no chat template; use /v1/completions",
                code="no_chat_template",
                param="model",
            )
        try:
            with bounded_time():
                return self._rendered(messages)
        except InvalidRequest:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise _broken(f"line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            if type(error) is not jinja2.TemplateError:  # undefined names, forbidden attributes
                raise _broken(f"{type(error).__name__}: {error.message}") from None
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error.message}",
                code="invalid_messages",
                param="messages",
            ) from None
        except MemoryError:
            raise _broken("it needs more memory than there is for one") from None
        except Exception as error:  # noqa: BLE001 - whatever a template may do wrong
            raise _broken(f"{type(error).__name__}: {error}") from None

    def _rendered(self, messages: Messages) -> str:
        parts: list[str] = []
        size = 0
        for part in _compiled(self.fingerprint, self.source).generate(
            messages=[dict(message) for message in messages],
            tools=[dict(tool) for tool in self.tools] or None,
            documents=None,
            add_generation_prompt=True,
            bos_token=self.bos,
            eos_token=self.eos,
        ):
            size += len(part)
            if size > self.most:
                raise overflow(
                    self.most // CHARACTERS_PER_TOKEN,
                    f"your messages make a prompt of more than {self.most} characters",
                    "reduce the length of the messages",
                    "messages",
                )
            parts.append(part)
        return "".join(parts)

    def segments(self, messages: Messages) -> list[PromptSegment]:
        """Return the prompt of `messages` in segments, the contents apart; joined they equal `render`'s text.

        The template sees a placeholder for each content, so contents that it would change or inspect stay unchanged.
        """
        hidden = [
            {**message, "content": f"{_OPEN}{index}{_CLOSE}"}
            for index, message in enumerate(messages)
        ]
        text, segments, at = self.render(hidden), [], 0
        for mark in _MARK.finditer(text):
            segments.append(PromptSegment(text[at : mark.start()]))
            segments.append(PromptSegment(messages[int(mark[1])]["content"], written=True))
            at = mark.end()
        return [segment for segment in (*segments, PromptSegment(text[at:])) if segment.text]


def after(segments: Sequence[PromptSegment], prefix: str) -> list[PromptSegment] | None:
    """Return the segments after `prefix`; None if the joined texts do not begin with `prefix`."""
    if not "".join(segment.text for segment in segments).startswith(prefix):
        return None
    left, rest = len(prefix), []
    for segment in segments:
        if left < len(segment.text):
            rest.append(segment._replace(text=segment.text[left:]))
        left = max(0, left - len(segment.text))
    return rest
