"""Resumption of prompts of which only the host has pages: attended there, fetched or computed anew, by cost alone.

`choose_resume` is a function of its arguments. Each way is priced as the seconds of the step that takes the prompt, and
the least of those that fit is chosen.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.decoder.executor.interface import LocalTier
from engine.decoder.offload.costs import OffloadCosts
from engine.decoder.offload.plan import SETTLE, PromptState, Resume


class StepWork(NamedTuple):
    """One batch by what it takes: rows, one layer's attention on either side, and pages copied between the tiers."""

    rows: int = 0
    device_s: float = 0.0
    host_s: float = 0.0
    pages: int = 0

    def seconds(self, costs: OffloadCosts) -> float:
        """Return the seconds of its layers: both sides attend at once, and copies run beside all of it."""
        layer_s = costs.linear.seconds(self.rows) + max(self.device_s, self.host_s)
        return max(costs.layers * layer_s, costs.page_s * self.pages)

    def plus(self, more: StepWork) -> StepWork:
        """Return both together."""
        return StepWork(
            self.rows + more.rows, self.device_s + more.device_s, self.host_s + more.host_s,
            self.pages + more.pages,
        )  # fmt: skip


class ResumeFits(NamedTuple):
    """What a step has room for: a home on the `device`, and one on the host if one of the tiers `attending` attends.

    `hidden` says that the rows which follow will be attended on the host behind linear work of others.
    """

    device: bool
    attending: frozenset[LocalTier]
    hidden: bool = True


class ResumeChoice(NamedTuple):
    """What becomes of the pages, the tier that attends with the prompt's rows, and the predicted seconds."""

    use: Resume
    attended: LocalTier
    seconds: float


def resume_choices(
    prompt: PromptState, beside: StepWork, costs: OffloadCosts, *, hidden: bool = True
) -> tuple[ResumeChoice, ...]:
    """Return all ways to use a prompt's history, in the order that decides between equals, whether they fit or not.

    The seconds are those of the step with the prompt and the work `beside` it. A home on the host costs besides what
    the host takes longer than the device for the rows that follow, until the sequence may move: nothing if they are
    `hidden`.
    """
    history, rows, pairs = prompt.history, prompt.rows, prompt.pairs(prompt.rows)
    own_s, anew, later_s = costs.prefill_s(1, pairs), prompt.anew, 0.0
    if not hidden:
        longer_s = costs.host_s(1, prompt.length) - costs.device_s(1, prompt.length)
        later_s = SETTLE * costs.layers * max(0.0, longer_s)

    def choice(use: Resume, attended: LocalTier, work: StepWork, more_s: float) -> ResumeChoice:
        return ResumeChoice(use, attended, beside.plus(work).seconds(costs) + more_s)

    # Rows of a prompt read its pages together; as many decode rows, which do not, are an upper bound.
    in_place = StepWork(rows, host_s=costs.host_s(rows, pairs), pages=history.copied)
    # The device attends to pages that come for this step only, each layer's before its attention.
    staged = StepWork(rows, own_s + staged_s(prompt, costs), pages=prompt.wanted_on_host)
    return (
        choice("fetch", "device", StepWork(rows, own_s, pages=history.fetched), 0.0),
        choice("attend", "host", in_place, later_s),
        choice("attend", "device", staged, later_s),
        choice("recompute", "device", StepWork(anew.rows, costs.prefill_s(1, anew.pairs(anew.rows))), 0.0),
    )  # fmt: skip


def choose_resume(
    prompt: PromptState, beside: StepWork, fits: ResumeFits, costs: OffloadCosts
) -> ResumeChoice | None:
    """Return the way of the least seconds among those that fit; None if none does."""
    found = [
        choice
        for choice in resume_choices(prompt, beside, costs, hidden=fits.hidden)
        if (choice.attended in fits.attending if choice.use == "attend" else fits.device)
    ]
    return min(found, key=lambda choice: choice.seconds, default=None)


def staged_s(prompt: PromptState, costs: OffloadCosts) -> float:
    """Return the seconds in which one layer of a history on the host comes to the device for one step."""
    return prompt.history.pages * costs.page_s / costs.layers
