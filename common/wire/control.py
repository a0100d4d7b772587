"""Messages to a generation that runs: new tokens for a part of its prompt, and where in its answer each took effect."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from common.wire.message import Message


class Extend(Message, frozen=True, tag="extend"):
    """Replace `removed` tokens of the prompt from `start` on by `tokens`; `number` counts a job's extensions from 1.

    The places are those of the prompt as the job was submitted, so a newer extension takes the place of all older ones.
    A message without a change (`removed` 0, no `tokens`) lets a generation that waits for this number go on. `note` is
    the sender's, logged with the extension and read by no worker.
    """

    number: int
    start: int = 0
    removed: int = 0
    tokens: list[int] = []
    note: bytes = b""


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
    """An extension took effect after `tokens` generated tokens; logged, so that another worker repeats it there."""

    tokens: int
    extension: Extend
