"""Metrics of attention on the host: decode rows by the tier that attends, and the seconds of steps in stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from common.types.helper_address import ChannelKind
from engine.decoder.executor.interface import AttendedBy, Moved
from engine.decoder.offload.plan import Choice, Resume

if TYPE_CHECKING:
    from engine.decoder.offload.homes import HomePlanner


class HomeMetrics:
    """Counters that follow the counts of one generator's home planner; without a planner all stay at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows = Counter(
            "spillway_decoded_rows",
            "Rows of decoding sequences by the tier that attended to them, where a part may be attended on the host.",
            ("attended",),
            registry=registry,
        )
        self._steps = Counter(
            "spillway_planned_steps",
            "Steps by what decided where they compute: on the device only, in one batch, in two, or else.",
            ("choice",),
            registry=registry,
        )
        self._seconds = Counter(
            "spillway_staged_steps_seconds",
            "Seconds of steps in stages as their plans predict them, and as measured.",
            ("kind",),
            registry=registry,
        )
        self._idle = Counter(
            "spillway_stage_idle_seconds",
            "Seconds in steps in stages, from their first stage to their last, in which a side computed nothing.",
            ("side",),
            registry=registry,
        )
        self._slack = Gauge(
            "spillway_stage_slack_seconds",
            "Predicted seconds by which the host is done before the device, in each half of a layer.",
            ("half",),
            registry=registry,
        )
        self._layers = Counter(
            "spillway_host_layers",
            "Layers of sub-batches attended on the host, where a helper may attend, by who did.",
            ("by",),
            registry=registry,
        )
        self._helper = Gauge(
            "spillway_host_helper",
            "Helpers that are attached for attention on the host, by the kind of channel to them.",
            ("channel",),
            registry=registry,
        )
        self._bytes = Counter(
            "spillway_host_channel_bytes",
            "Bytes over TCP to and from a helper on another machine: rows and pages sent, results received.",
            ("kind",),
            registry=registry,
        )
        for channel in get_args(ChannelKind):
            self._helper.labels(channel)
        for moved in get_args(Moved):
            self._bytes.labels(moved)
        self._resumed = Counter(
            "spillway_resumed_prompts",
            "Prompts of which only the host had pages, by what became of these: attended, fetched, computed or split.",
            ("use",),
            registry=registry,
        )
        self._pages = Counter(
            "spillway_host_home_pages",
            "Pages that sequences came home to on the host, by who had them: a sequence there, nobody, or the device.",
            ("how",),
            registry=registry,
        )
        for use in get_args(Resume):
            self._resumed.labels(use)
        for how in ("shared", "found", "copied"):
            self._pages.labels(how)
        for by in get_args(AttendedBy):
            self._layers.labels(by)
        for attended in ("device", "host", "both"):
            self._rows.labels(attended)
        for tier in ("device", "host"):
            self._idle.labels(tier)
        for choice in get_args(Choice):
            self._steps.labels(choice)
        for kind in ("predicted", "measured"):
            self._seconds.labels(kind)
        for half in ("long", "short"):
            self._slack.labels(half)
        self._last: dict[tuple[Counter, str], float] = {}

    def observe(self, homes: HomePlanner) -> None:
        """Record the planner's present counts."""
        self._rise(self._rows, "host", homes.on_host)
        self._rise(self._rows, "both", homes.on_both)
        self._rise(self._rows, "device", homes.decoded - homes.on_host - homes.on_both)
        for by, layers in homes.executor.host_layers.items():
            self._rise(self._layers, by, layers)
        link = homes.executor.helper_link
        for channel in get_args(ChannelKind):
            self._helper.labels(channel).set(link is not None and link.kind == channel)
        for moved, size in ({} if link is None else link.moved).items():
            self._rise(self._bytes, moved, size)
        for choice, count in homes.choices.items():
            self._rise(self._steps, choice, count)
        for use, prompts in homes.resumed.items():
            self._rise(self._resumed, use, prompts)
        for how, pages in homes.host_pages.items():
            self._rise(self._pages, how, pages)
        self._rise(self._seconds, "predicted", homes.predicted_s)
        self._rise(self._seconds, "measured", homes.measured_s)
        for side, seconds in homes.idle_s.items():
            self._rise(self._idle, side, seconds)
        long_s, short_s = homes.slack_s
        self._slack.labels("long").set(long_s)
        self._slack.labels("short").set(short_s)

    def _rise(self, metric: Counter, label: str, to: float) -> None:
        metric.labels(label).inc(to - self._last.get((metric, label), 0.0))
        self._last[metric, label] = to
