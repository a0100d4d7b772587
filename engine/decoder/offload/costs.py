"""Costs of a step's stages when the host attends to some of the sequences, in seconds (NEO, section 3.2)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from common.cost.linear import LinearCost, Probe
from common.cost.online import OnlineCost
from common.cost.table import CostTable, OnlineTable
from engine.decoder.executor.interface import HelperLink

Attention = Literal["device", "host", "prefill", "exchange"]


class OffloadCosts(NamedTuple):
    """Cost models of one layer's stages, and the seconds of a step outside its layers.

    `linear` are the stages that read weights, before and after attention, by rows. `device` and `host` are decode
    attention by sequences and attended tokens, `prefill` is attention of prompts by prompts and (row, attended token)
    pairs, `exchange` the transfer of rows by rows: Q, K and V to the host, and O back. `page_s` is the time to copy one
    page of all layers between the tiers, `step_s` the time of a step outside its layers. `whole` is a step of decode
    rows of the device alone in one piece, by sequences and attended tokens; None where its stages take no longer.
    """

    layers: int
    linear: CostTable
    device: LinearCost
    host: LinearCost
    prefill: LinearCost
    exchange: LinearCost
    page_s: float
    step_s: float
    whole: LinearCost | None = None

    def over(self, link: HelperLink) -> OffloadCosts:
        """Return the costs with a helper on a link, over which rows and moved pages are sent, too."""
        way, exchange = link.cost, self.exchange
        return self._replace(
            exchange=LinearCost(
                exchange.beta_s + way.beta_s,
                exchange.alpha_items_s + way.alpha_tokens_s * link.row_bytes,
                exchange.alpha_tokens_s,
            ),
            page_s=self.page_s + way.alpha_tokens_s * link.page_bytes,
        )

    def whole_s(self, sequences: int, tokens: int, staged_s: float) -> float:
        """Return the seconds of decode rows of the device alone, which in stages would take `staged_s`."""
        return staged_s if self.whole is None else self.whole.seconds(sequences, tokens)

    def device_s(self, sequences: int, tokens: int) -> float:
        """Return the seconds of one layer's decode attention on the device."""
        return self.device.seconds(sequences, tokens) if sequences else 0.0

    def host_s(self, sequences: int, tokens: int) -> float:
        """Return the seconds of one layer's decode attention on the host, including the transfer of rows both ways."""
        if not sequences:
            return 0.0
        return self.host.seconds(sequences, tokens) + self.exchange.seconds(sequences, 0)

    def prefill_s(self, prompts: int, pairs: int) -> float:
        """Return the seconds of one layer's attention of prompts."""
        return self.prefill.seconds(prompts, pairs) if prompts else 0.0


class OffloadPoints(msgspec.Struct, frozen=True):
    """Measurements at the start, per layer: (rows, seconds), or for kinds of attention (items, tokens, seconds).

    `whole` are (sequences, tokens, seconds) of steps, not of layers.
    """

    layers: int
    linear: list[tuple[float, float]]
    device: list[Probe]
    host: list[Probe]
    prefill: list[Probe]
    exchange: list[Probe]
    page_s: float
    step_s: float
    whole: list[Probe] = []


class OffloadProfile:
    """The costs of one model on one machine: fitted to measured points, and re-fitted after every timed stage."""

    def __init__(self, points: OffloadPoints) -> None:
        """Begin with measured points; ValueError if a stage has no point."""
        self._points = points
        self._linear = OnlineTable(points.linear)
        self._attention: dict[Attention, OnlineCost] = {
            "device": OnlineCost(points.device),
            "host": OnlineCost(points.host),
            "prefill": OnlineCost(points.prefill),
            "exchange": OnlineCost(points.exchange),
        }
        self._whole = OnlineCost(points.whole) if points.whole else None

    @property
    def costs(self) -> OffloadCosts:
        """The costs as fitted so far."""
        lines = {name: online.cost for name, online in self._attention.items()}
        points = self._points
        return OffloadCosts(
            points.layers, self._linear.table, lines["device"], lines["host"], lines["prefill"],
            lines["exchange"], points.page_s, points.step_s, None if self._whole is None else self._whole.cost,
        )  # fmt: skip

    def linear_took(self, rows: int, seconds: float) -> float:
        """Learn from one layer's linear stage; return measured / predicted seconds."""
        return self._linear.observe(rows, seconds)

    def attention_took(self, stage: Attention, items: int, tokens: int, seconds: float) -> float:
        """Learn from one layer's attention stage or exchange; return measured / predicted seconds."""
        return self._attention[stage].observe(items, tokens, seconds)

    def whole_took(self, sequences: int, tokens: int, seconds: float) -> None:
        """Learn from a step of decode rows of the device alone in one piece, where such steps have a cost."""
        if self._whole is not None:
            self._whole.observe(sequences, tokens, seconds)


def keep(folder: Path, machine: str, fingerprint: str, points: OffloadPoints) -> None:
    """Write the measurements of a model on a machine to a file, to be read by `kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    place = _place(folder, machine, fingerprint)
    fresh = place.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(points))
    fresh.replace(place)


def kept(folder: Path, machine: str, fingerprint: str) -> OffloadPoints | None:
    """Return the stored measurements of a model on a machine; None if there are none, or if they cannot be read."""
    try:
        return msgspec.json.decode(
            _place(folder, machine, fingerprint).read_bytes(), type=OffloadPoints
        )
    except (OSError, msgspec.DecodeError):
        return None


def _place(folder: Path, machine: str, fingerprint: str) -> Path:
    # Measurements of other fields, by an earlier version, are not found again.
    key = "\0".join((machine, fingerprint, *OffloadPoints.__struct_fields__))
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return folder / f"offload-{name}.json"
