"""Messages to a generation that runs: new tokens for a part of its prompt, and where in its answer each took effect."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from common.wire.message import Message, _checked


class Extend(Message, frozen=True, tag="extend"):
    """Replace `removed` tokens from `start` on by `tokens`; `number` counts a job's extensions from 1.

    Positions are those of the prompt that the job was admitted with: each extension takes the place of the one before
    it, so one may be left out. A message without a change (`removed` 0, no `tokens`) leaves the prompt as it is by
    then, and lets a generation that waits for this number go on. The sender's `note` is logged with the extension.
    """

    number: int
    start: int = 0
    removed: int = 0
    tokens: list[int] = []
    note: bytes = b""

    @property
    def changes(self) -> bool:
        """False if the prompt stays as it is."""
        return bool(self.removed or self.tokens)

    def prompt(self, admitted: list[int]) -> list[int]:
        """Return the prompt that this extension, if it changes anything, makes of the one that was admitted."""
        return [*admitted[: self.start], *self.tokens, *admitted[self.start + self.removed :]]


class Pause(Message, frozen=True, tag="pause"):
    """Stop generating between two steps; pages stay. The next `Extend`, or `resume`, ends the pause."""

    resume: bool = False


Control = Extend | Pause


class ExtensionRule(Struct, frozen=True):
    """Boundaries where a generation takes extensions: after each `every` generated tokens, at most `most` times.

    At boundary j a generation that is to "wait" pauses until extension j is there; one that is to "keep" takes the
    newest that is there, and goes on.
    """

    every: int
    most: int
    late: Literal["wait", "keep"] = "wait"


class Applied(Struct, frozen=True):
    """An extension took effect after `tokens` generated tokens; logged, so that another worker repeats it there.

    `at` is the index of the event that it was first logged in. An extension that could not take effect is logged as one
    without a change, and without its note.
    """

    tokens: int
    extension: Extend
    at: int = 0


_control = msgspec.msgpack.Decoder(Control)


def decode_control(data: bytes) -> Control:
    """Decode a message to a running job by its tag; BadMessage if it is none of ours."""
    message: Control = _checked(_control, "control", data)
    return message
