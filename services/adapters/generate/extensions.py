"""Extensions of one job's prompt: the received ones, the boundaries where they take effect, and the applied ones."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from common.bus.control import ControlState
from common.wire.control import Applied, Extend, ExtensionRule


class PromptExtensions:
    """Extensions of a generation with one prompt; they take effect at its rule's boundaries, or at once without a rule.

    `applied` extensions are in the job's log, `gained` ones have taken effect since the last event. While `paused` the
    job's owner wants no tokens; `waits_since_s` is the time when the generation began to wait for an extension. `heard`
    is true once messages were fetched; before, no boundary is decided.
    """

    def __init__(
        self,
        rule: ExtensionRule | None,
        admitted: Sequence[int],
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`admitted` is the prompt with which the job was admitted, `spans` its passages that are computed alone."""
        self.rule, self.admitted, self.spans = rule, list(admitted), list(spans)
        self.applied: list[Applied] = []
        self.gained: list[Applied] = []
        self.heard = self.paused = False
        self.waits_since_s: float | None = None
        self._sent: dict[int, Extend] = {}
        self._passed = 0  # number of boundaries passed
        self.number = 0  # number of the last extension that took effect

    @property
    def logged(self) -> list[int]:
        """The prompt according to the job's log."""
        last = self._last_change
        return self.admitted if last is None else last.prompt(self.admitted)

    @property
    def logged_spans(self) -> list[tuple[int, int]]:
        """The spans of the prompt according to the job's log."""
        last = self._last_change
        return self.spans if last is None else last.spans

    @property
    def _last_change(self) -> Extend | None:
        changes = (each.extension for each in reversed(self.applied) if each.extension.changes)
        return next(changes, None)

    @property
    def boundary(self) -> int | None:
        """The number of tokens after which the next extension takes effect; None without a further boundary."""
        if self.rule is None or self._passed >= self.rule.most:
            return None
        return (self._passed + 1) * self.rule.every

    def hear(self, found: ControlState, tokens: int) -> bool:
        """Take the job's messages so far; return whether they change anything when the answer has `tokens` tokens."""
        was = self.heard, self.paused
        self._sent = {each.number: each for each in found.extensions if each.number > self.number}
        self.heard, self.paused = True, found.paused
        begins = not was[0] and tokens == self.boundary
        return begins or was[1] is not self.paused or self.next(tokens) is not None

    def next(self, tokens: int) -> Extend | None:
        """Return the extension that takes effect after `tokens` tokens; None if there is none."""
        if self.rule is not None:
            if tokens != self.boundary:
                return None
            if self.rule.late == "wait":
                return self._sent.get(self._passed + 1)
        return self._sent[max(self._sent)] if self._sent else None

    def waits(self, tokens: int) -> bool:
        """Return whether generation must wait after `tokens` tokens, since the extension due there is missing."""
        waits = self.rule is not None and self.rule.late == "wait" and tokens == self.boundary
        return waits and self.next(tokens) is None

    def apply(self, tokens: int, extension: Extend) -> None:
        """Record that an extension took effect after `tokens` tokens; earlier extensions are dropped."""
        self.gained.append(Applied(tokens, extension))
        self.number = extension.number
        self._sent = {n: each for n, each in self._sent.items() if n > self.number}

    def passes(self) -> None:
        """Record that the generation continues beyond its boundary."""
        self._passed += 1

    def take(self, at: int) -> list[Applied]:
        """Return the extensions that took effect since the last call, marked as logged in event `at`."""
        taken, self.gained = [replace(each, at=at) for each in self.gained], []
        return taken

    def restore(self, applied: Sequence[Applied], tokens: int) -> None:
        """Continue after `tokens` tokens, at the end of a log; extensions in `applied` are not applied again."""
        self.applied = list(applied)
        self.number = applied[-1].extension.number if applied else 0
        if self.rule is not None:
            behind = tokens // self.rule.every
            decided = any(each.tokens == tokens for each in applied)
            if behind and tokens % self.rule.every == 0 and not decided:
                behind -= 1  # the log does not tell what was decided at this boundary
            self._passed = min(behind, self.rule.most)
