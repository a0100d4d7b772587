"""Resumption of prompts whose pages only the host has: attended in place, fetched or recomputed, by predicted seconds.

`choose_resume` is a pure function. The price of each choice is the duration of the step that takes the prompt; the
cheapest choice that fits wins.
"""

from __future__ import annotations

from typing import NamedTuple

from common.pages.identity import PAGE
from engine.decoder.executor.interface import LocalTier
from engine.decoder.offload.costs import OffloadCosts
from engine.decoder.offload.plan import SETTLE, PromptState, Resume


class StepWork(NamedTuple):
    """The work of one batch: rows, seconds of a layer's attention on each side, and pages copied between tiers."""

    rows: int = 0
    device_s: float = 0.0
    host_s: float = 0.0
    pages: int = 0

    def seconds(self, costs: OffloadCosts) -> float:
        """Return the seconds of all layers: both sides attend at the same time, and copies run beside the layers."""
        layer_s = costs.linear.seconds(self.rows) + max(self.device_s, self.host_s)
        return max(costs.layers * layer_s, costs.page_s * self.pages)

    def plus(self, more: StepWork) -> StepWork:
        """Return the sum of both works."""
        return StepWork(
            self.rows + more.rows, self.device_s + more.device_s, self.host_s + more.host_s,
            self.pages + more.pages,
        )  # fmt: skip


class ResumeFits(NamedTuple):
    """The choices that fit a step: a home on the `device`, and a home on the host attended by a tier in `attending`.

    `split`: a home on the device with a front on the host.
    `hidden`: attention to the prompt's later rows on the host will overlap with linear work of other sequences.
    """

    device: bool
    attending: frozenset[LocalTier] = frozenset()
    hidden: bool = True
    split: bool = False


class ResumeChoice(NamedTuple):
    """A choice: the use of the pages, the tier that attends with the prompt's rows, and the predicted seconds."""

    use: Resume
    attended: LocalTier
    seconds: float


def resume_choices(
    prompt: PromptState, beside: StepWork, costs: OffloadCosts, *, hidden: bool = True
) -> tuple[ResumeChoice, ...]:
    """Return all choices, whether they fit or not; of equally cheap ones the first is preferred.

    The seconds are those of the step with the prompt and the work `beside` it. To a home on the host they add the time
    that the host takes longer than the device for later rows, until the sequence may move; nothing if those are
    `hidden`. Later rows with a front are in the device's batch, so the time that they wait for the host always counts.
    """
    history, rows, pairs = prompt.history, prompt.rows, prompt.pairs(prompt.rows)
    own_s, anew, later_s = costs.prefill_s(1, pairs), prompt.anew, 0.0
    if not hidden:
        longer_s = costs.host_s(1, prompt.length) - costs.device_s(1, prompt.length)
        later_s = SETTLE * costs.layers * max(0.0, longer_s)

    def choice(use: Resume, attended: LocalTier, work: StepWork, more_s: float) -> ResumeChoice:
        return ResumeChoice(use, attended, beside.plus(work).seconds(costs) + more_s)

    # Rows of a prompt read its pages together; the cost of as many separate decode rows is an upper bound.
    in_place = StepWork(rows, host_s=costs.host_s(rows, pairs), pages=history.copied)
    # The device attends to pages copied for this step only, layer by layer before the layer's attention.
    staged = StepWork(rows, own_s + staged_s(prompt, costs), pages=prompt.wanted_on_host)
    splits = (_split_choice(prompt, beside, costs),) if history.front else ()
    return (
        choice("fetch", "device", StepWork(rows, own_s, pages=history.fetched), 0.0),
        choice("attend", "host", in_place, later_s),
        choice("attend", "device", staged, later_s),
        choice("recompute", "device", StepWork(anew.rows, costs.prefill_s(1, anew.pairs(anew.rows))), 0.0),
        *splits,
    )  # fmt: skip


def _split_choice(prompt: PromptState, beside: StepWork, costs: OffloadCosts) -> ResumeChoice:
    """Return the choice of a front that stays on the host."""
    split, rows = prompt.split, prompt.rows
    there, front = split.front_pairs(rows), split.front * PAGE
    work = StepWork(
        rows,
        costs.prefill_s(1, split.pairs(rows) - there),
        costs.host_s(rows, there),
        prompt.history.later,
    )
    hiding_s = beside.device_s + costs.device_s(1, prompt.length - front)
    waits_s = max(0.0, costs.host_s(1, front) - hiding_s)
    seconds = beside.plus(work).seconds(costs) + SETTLE * costs.layers * waits_s
    return ResumeChoice("split", "device", seconds)


def choose_resume(
    prompt: PromptState, beside: StepWork, fits: ResumeFits, costs: OffloadCosts
) -> ResumeChoice | None:
    """Return the fitting choice with the least seconds; None if no choice fits."""
    found = [
        choice
        for choice in resume_choices(prompt, beside, costs, hidden=fits.hidden)
        if _fits(choice, fits)
    ]
    return min(found, key=lambda choice: choice.seconds, default=None)


def _fits(choice: ResumeChoice, fits: ResumeFits) -> bool:
    if choice.use == "attend":
        return choice.attended in fits.attending
    return fits.split if choice.use == "split" else fits.device


def staged_s(prompt: PromptState, costs: OffloadCosts) -> float:
    """Return the seconds to copy one layer of a prompt's history from the host to the device."""
    return prompt.history.pages * costs.page_s / costs.layers
