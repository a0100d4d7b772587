"""The extensions of one job's prompt: those it was sent, where it takes them, and those that took effect."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from common.bus.control import ControlState
from common.wire.control import Applied, Extend, ExtensionRule


class PromptExtensions:
    """What a generation with one prompt was sent; it takes extensions at its rule's boundaries, without a rule at once.

    `applied` are in the job's log, `gained` took effect since. While `paused` the job's owner wants no tokens;
    `waits_since_s` is when the generation began to wait for an extension. Before it has `heard` nothing is decided.
    """

    def __init__(self, rule: ExtensionRule | None, admitted: Sequence[int]) -> None:
        """`admitted` is the prompt that the job was admitted with."""
        self.rule, self.admitted = rule, list(admitted)
        self.applied: list[Applied] = []
        self.gained: list[Applied] = []
        self.heard = self.paused = False
        self.waits_since_s: float | None = None
        self._sent: dict[int, Extend] = {}
        self._passed = 0  # boundaries
        self.number = 0  # of the last extension that took effect

    @property
    def logged(self) -> list[int]:
        """The prompt as the job's log has it."""
        changes = (each.extension for each in reversed(self.applied) if each.extension.changes)
        last = next(changes, None)
        return self.admitted if last is None else last.prompt(self.admitted)

    @property
    def boundary(self) -> int | None:
        """After how many tokens the next extension is taken; None if there is no such place."""
        if self.rule is None or self._passed >= self.rule.most:
            return None
        return (self._passed + 1) * self.rule.every

    def hear(self, found: ControlState, tokens: int) -> bool:
        """Take what the job was sent by now; return whether that changes anything after so many tokens."""
        was = self.heard, self.paused
        self._sent = {each.number: each for each in found.extensions if each.number > self.number}
        self.heard, self.paused = True, found.paused
        begins = not was[0] and tokens == self.boundary
        return begins or was[1] is not self.paused or self.next(tokens) is not None

    def next(self, tokens: int) -> Extend | None:
        """Return the extension that takes effect now, after so many tokens; None if none does."""
        if self.rule is not None:
            if tokens != self.boundary:
                return None
            if self.rule.late == "wait":
                return self._sent.get(self._passed + 1)
        return self._sent[max(self._sent)] if self._sent else None

    def waits(self, tokens: int) -> bool:
        """Return whether no token may follow so many tokens before an extension that is not there."""
        waits = self.rule is not None and self.rule.late == "wait" and tokens == self.boundary
        return waits and self.next(tokens) is None

    def apply(self, tokens: int, extension: Extend) -> None:
        """Note that an extension took effect after so many tokens; those before it will not."""
        self.gained.append(Applied(tokens, extension))
        self.number = extension.number
        self._sent = {n: each for n, each in self._sent.items() if n > self.number}

    def passes(self) -> None:
        """Note that the generation goes on behind its boundary."""
        self._passed += 1

    def take(self, at: int) -> list[Applied]:
        """Return what took effect since the last call, as event `at` logs it."""
        taken, self.gained = [replace(each, at=at) for each in self.gained], []
        return taken

    def restore(self, applied: Sequence[Applied], tokens: int) -> None:
        """Go on after so many tokens, where a log ends; what was applied there is not applied again."""
        self.applied = list(applied)
        self.number = applied[-1].extension.number if applied else 0
        if self.rule is not None:
            behind = tokens // self.rule.every
            decided = any(each.tokens == tokens for each in applied)
            if behind and tokens % self.rule.every == 0 and not decided:
                behind -= 1  # nothing that was delivered says what was decided here
            self._passed = min(behind, self.rule.most)
