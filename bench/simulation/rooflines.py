"""Rooflines of the machines in NEO's evaluation: what each stage of a layer takes, by bytes, operations and bandwidths.

A layer's linear work takes the longer of reading its weights and computing its rows; attention reads keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

from common.cost.linear import LinearCost, Probe
from common.cost.table import CostTable
from common.pages.identity import PAGE
from engine.decoder.offload.costs import OffloadCosts, OffloadPoints

_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
_HOST_CALL_S, _DEVICE_CALL_S, _WAY_S = 30e-6, 5e-6, 20e-6
_STEP_S = 1e-3  # embedding, head, sampling and planning


class ModelSize(NamedTuple):
    """A decoder: layers, bytes of all their weights, width, and bytes of keys and values of a token in one layer."""

    name: str
    layers: int
    weight_bytes: float
    width: int
    kv_bytes: int


class RooflineMachine(NamedTuple):
    """A device and its host: bytes/s and operations/s reached, bytes/s between them, and tokens that each can hold."""

    name: str
    device_bytes_s: float
    device_ops_s: float
    host_bytes_s: float
    link_bytes_s: float
    device_tokens: int
    host_tokens: int


LLAMA_8B = ModelSize("LLaMa-3.1-8B", 32, 14e9, 4096, 4096)
LLAMA_7B = ModelSize("LLaMa-2-7B", 32, 13e9, 4096, 16384)
LLAMA_70B = ModelSize("LLaMa-3.1-70B", 80, 137e9, 8192, 4096)

# Shares reached: 0.8 of a memory's bandwidth, 0.5 of an A10G's and an H100's operations, 0.4 of a T4's.
_A10G = RooflineMachine("A10G", 0.8 * 600e9, 0.5 * 125e12, 50e9, 20e9, 40_000, 256_000)
A10G = {
    "g5.2xlarge": _A10G._replace(name="g5.2xlarge", host_tokens=128_000),
    "g5.4xlarge": _A10G._replace(name="g5.4xlarge"),
    "g5.8xlarge": _A10G._replace(name="g5.8xlarge", host_bytes_s=100e9, host_tokens=512_000),
    "g5.16xlarge": _A10G._replace(name="g5.16xlarge", host_bytes_s=200e9, host_tokens=1_024_000),
}
T4 = {
    tokens: RooflineMachine(
        f"T4, {tokens:,} tokens", 0.8 * 320e9, 0.4 * 65e12, 60e9, 10e9, tokens, 60_000
    )
    for tokens in (640, 1024, 2400)
}
# Two devices as one; their host is one of four memory nodes.
H100 = RooflineMachine("2 x H100", 0.8 * 6.7e12, 0.5 * 1980e12, 120e9, 80e9, 36_000, 600_000)


def costs(machine: RooflineMachine, model: ModelSize) -> OffloadCosts:
    """Return the seconds of every stage of a layer."""
    weights_s = model.weight_bytes / model.layers / machine.device_bytes_s
    row_s = (
        model.weight_bytes / model.layers / machine.device_ops_s
    )  # two operations a weight of two bytes
    # Q and O are as wide as the model, K and V what a token keeps; two bytes a number.
    way_bytes = 4 * model.width + model.kv_bytes
    return OffloadCosts(
        layers=model.layers,
        linear=CostTable((rows, max(weights_s, rows * row_s)) for rows in _ROWS),
        device=LinearCost(_DEVICE_CALL_S, 0.0, model.kv_bytes / machine.device_bytes_s),
        host=LinearCost(_HOST_CALL_S, 0.0, model.kv_bytes / machine.host_bytes_s),
        prefill=LinearCost(_DEVICE_CALL_S, 0.0, 4 * model.width / machine.device_ops_s),
        exchange=LinearCost(_WAY_S, way_bytes / machine.link_bytes_s, 0.0),
        page_s=PAGE * model.layers * model.kv_bytes / machine.link_bytes_s,
        step_s=_STEP_S,
    )


def points(found: OffloadCosts) -> OffloadPoints:
    """Return what a machine of these costs would have been measured at, without noise."""
    sizes = [(count, count * length) for count in (1, 4, 16, 64) for length in (64, 1024)]
    stages = (found.device, found.host, found.prefill, found.exchange)
    device, host, prefill, exchange = (
        [Probe(count, tokens, stage.seconds(count, tokens)) for count, tokens in sizes]
        for stage in stages
    )
    table = list(found.linear.points)
    return OffloadPoints(
        found.layers, table, device, host, prefill, exchange, found.page_s, found.step_s
    )
