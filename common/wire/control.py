"""Messages to a running generation: new tokens for a part of its prompt, and the points of their effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from common.wire.message import Message, _checked


class Extend(Message, frozen=True, tag="extend"):
    """Replace `removed` tokens from `start` on by `tokens`; `number` counts a job's extensions from 1.

    Positions are those of the prompt at the job's admission: each extension replaces the one before it, so one may be
    left out. A message without a change (`removed` 0, no `tokens`) keeps the current prompt, and lets a generation that
    waits for this number go on. The sender's `note` is logged with the extension. `spans` are all those of the prompt
    that a change makes (see `GenerateWork`), counted in that prompt.
    """

    number: int
    start: int = 0
    removed: int = 0
    tokens: list[int] = []
    note: bytes = b""
    spans: list[tuple[int, int]] = []

    @property
    def changes(self) -> bool:
        """Whether the extension changes the prompt."""
        return bool(self.removed or self.tokens)

    def prompt(self, admitted: list[int]) -> list[int]:
        """Return the prompt that this extension, if it changes the prompt, makes of the admitted one."""
        return [*admitted[: self.start], *self.tokens, *admitted[self.start + self.removed :]]


class Pause(Message, frozen=True, tag="pause"):
    """Stop generating between two steps; pages stay. The next `Extend`, or `resume`, ends the pause."""

    resume: bool = False


Control = Extend | Pause


class ExtensionRule(Struct, frozen=True):
    """Boundaries where a generation takes extensions: after each `every` generated tokens, at most `most` times.

    At boundary j a generation with `late` "wait" pauses until extension j has come; with "keep" it takes the newest
    extension that has come, and goes on.
    """

    every: int
    most: int
    late: Literal["wait", "keep"] = "wait"


class Applied(Struct, frozen=True):
    """The effect of an extension after `tokens` generated tokens; logged, so that another worker can repeat it there.

    `at` is the index of the event in which it was first logged. An extension that could not take effect is logged
    without a change and without its note.
    """

    tokens: int
    extension: Extend
    at: int = 0


def span_problem(spans: Sequence[tuple[int, int]], length: int) -> str:
    """Return what is wrong with the spans of a prompt of `length` tokens; empty if nothing is.

    Spans must rise without overlapping, and leave out the first and the last token, which are always computed.
    """
    before = 1
    for begin, end in spans:
        if not before <= begin < end <= length - 1:
            return (
                f"a passage's span is {begin} to {end}: expected at least one token from {before} to {length - 1}, "
                "rising, without the prompt's first and last token"
            )
        before = end
    return ""


_control = msgspec.msgpack.Decoder(Control)


def decode_control(data: bytes) -> Control:
    """Decode a message to a running job by its tag; BadMessage for other bytes."""
    message: Control = _checked(_control, "control", data)
    return message
