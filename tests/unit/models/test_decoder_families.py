"""Every family's logits are those of transformers, on small random models of every shape the family allows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.engine import random_models
from bench.engine.stepping import Line, Scatter
from common.types.generation import SamplingParams
from engine.decoder.executor.interface import SamplingRequest
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.models.decoders.compiled_decoder import PackedLinear, WeightKind, load_kernels
from engine.models.decoders.rope import parse_rope
from engine.models.decoders.rotary import frequencies

FAMILIES = random_models.FAMILIES
LENGTH = 230
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _load(directory: Path, dtype: str = "fp32", *, compiled: bool = True) -> TorchExecutor:
    return TorchExecutor.load(
        str(directory), device="cpu", dtype=dtype, threads=1, kv_bytes=8 << 20, compiled=compiled
    )


def _tokens(seed: int, count: int = LENGTH) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(random_models.VOCABULARY) for _ in range(count)]


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the worst row's largest difference over its largest logit."""
    worst = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    return float(worst.max())


def _reload(directory: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model in `dtype`; `model.to` would round the rotation's frequencies too."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.eval()


def _whole(runner: TorchExecutor, tokens: list[int]) -> torch.Tensor:
    line = Line(Scatter(runner, random.Random(1)), tokens)
    return runner.logits([line.next_rows(len(tokens))])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: str, seed: int) -> None:
    """A sequence computed at once gives transformers' logits at every row."""
    chosen = random_models.settings(family, seed)
    model = random_models.write(tmp_path, family, chosen, seed=seed, shards=1 + 2 * (seed % 2))
    tokens = _tokens(seed)

    expected = random_models.oracle(model, tokens)
    for compiled in (True, False):
        found = _whole(_load(tmp_path, compiled=compiled), tokens)
        assert _relative(found, expected) <= TOLERANCE


@pytest.mark.parametrize("seed", range(2))
def test_what_reads_text_in_a_model_that_also_sees(tmp_path: Path, seed: int) -> None:
    """Of a Gemma 3 with a part for images the other one is read, whatever its tensors are named by."""
    sees = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    chosen = {
        "text_config": random_models.settings("gemma3_text", seed),
        "vision_config": {**sees, "image_size": 16, "patch_size": 8},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": seed == 0,
    }
    model = random_models.write(tmp_path, "gemma3", chosen, seed=seed)
    tokens = _tokens(seed)

    found = _whole(_load(tmp_path), tokens)

    assert _relative(found, random_models.oracle(model, tokens)) <= TOLERANCE


@pytest.mark.parametrize("rope", random_models.ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_rotations_equal_transformers_far_out(tmp_path: Path, rope: dict[str, Any]) -> None:
    """At the end of a long context every kind of rotation still turns as transformers turns."""
    chosen = {
        **random_models.settings("llama", 1),
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10_000.0, **rope},
    }
    model = random_models.write(tmp_path, "llama", chosen)
    tokens = _tokens(2, 2500)
    line = Line(Scatter(runner := _load(tmp_path), random.Random(1)), tokens)
    while line.computed < 2400:
        runner.logits([line.next_rows(800)])

    found = runner.logits([line.next_rows(100)])

    assert _relative(found, random_models.oracle(model, tokens)[2400:]) <= TOLERANCE


_POSITIVE = st.floats(0.5, 50, allow_subnormal=False)
_SCALINGS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": _POSITIVE}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": st.floats(1, 32),
            "low_freq_factor": st.floats(0.5, 2),
            "high_freq_factor": st.floats(2.5, 8),
            "original_max_position_embeddings": st.integers(16, 8192),
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": st.floats(1, 64),
            "original_max_position_embeddings": st.integers(16, 32768),
        },
        optional={
            "beta_fast": st.floats(16, 64),
            "beta_slow": st.floats(0.5, 4),
            "truncate": st.booleans(),
            "mscale": st.floats(0.5, 2),
            "mscale_all_dim": st.floats(0.5, 2),
            "attention_factor": st.floats(0.5, 2),
        },
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_SCALINGS, st.sampled_from((8, 64, 128)), st.sampled_from((1e4, 5e5, 1e6)))
def test_frequencies_equal_transformers(scaling: dict[str, Any], dim: int, theta: float) -> None:
    """For any parameters of a rotation, to the last bit."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": theta, **scaling}
    config = transformers.LlamaConfig(head_dim=dim, rope_parameters=dict(parameters))
    expected, attention = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))

    rope = parse_rope({"rope_parameters": parameters}, head_dim=dim, positions=2048, where="here")

    assert torch.equal(frequencies(rope, dim), expected)
    assert rope.attention == attention


def test_mixed_windows_are_layer_groups(tmp_path: Path) -> None:
    """Qwen2 with layer_types has one group per kind of layer, and the logits of transformers."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    chosen = {
        **random_models.settings("qwen2", 3),
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "use_sliding_window": True,
        "sliding_window": 40,
    }
    model = random_models.write(tmp_path, "qwen2", chosen)
    tokens = _tokens(3)
    runner = _load(tmp_path)

    assert runner.shape.windows == [None, 40]
    assert _relative(_whole(runner, tokens), random_models.oracle(model, tokens)) <= TOLERANCE


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gemma3_text", "phi3"}))
def test_older_configuration_keys_mean_the_same(tmp_path: Path, family: str) -> None:
    """Files written before rope_parameters (rope_theta, rope_scaling with "type") give the same logits."""
    chosen = random_models.settings(family, 6)
    chosen["rope_parameters"] = {"rope_theta": 20_000.0, "rope_type": "linear", "factor": 2.0}
    random_models.write(tmp_path, family, chosen)
    tokens = _tokens(4, 100)
    newer = _whole(_load(tmp_path), tokens)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("rope_parameters")
    for key in ("dtype", "layer_types"):
        config.pop(key, None)
    older = {"rope_theta": 20_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    path.write_text(json.dumps({**config, **older, "torch_dtype": "float32"}))

    assert torch.equal(_whole(_load(tmp_path), tokens), newer)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_agrees_with_transformers_in_bf16(tmp_path: Path, family: str) -> None:
    """In bf16 we are as near to fp32 as transformers is."""
    chosen = random_models.settings(family, 2)
    model = random_models.write(tmp_path, family, chosen)
    tokens = _tokens(5, 120)
    exact = random_models.oracle(model, tokens)

    theirs = random_models.oracle(_reload(tmp_path, torch.bfloat16), tokens)
    theirs_off = (theirs - exact).abs().mean()
    for compiled, share in ((True, 1.0), (False, 1.25)):  # kernels round less often than torch
        found = _whole(_load(tmp_path, "bf16", compiled=compiled), tokens)
        assert (found - exact).abs().mean() <= share * theirs_off
        agreement = float((found.argmax(-1) == theirs.argmax(-1)).float().mean())
        assert agreement >= 0.9, f"greedy tokens agree on {agreement:.1%} of rows"


def _rounded(weight: torch.Tensor, kind: WeightKind) -> torch.Tensor:
    """Return a matrix as int8 or int4 has it (`test_decoder_linear.py` says what that is)."""
    kernels = load_kernels()
    assert kernels is not None
    return PackedLinear(kernels, weight, kind, threads=1).numbers()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_small_weights_are_rounded_as_said(tmp_path: Path, family: str, kind: WeightKind) -> None:
    """The logits are those of transformers with rounded weights, but for the rounding of activations to 8 bits."""
    chosen = {**random_models.settings(family, 3), "tie_word_embeddings": False}
    model = random_models.write(tmp_path, family, chosen)
    tokens = _tokens(5, 120)
    plain = random_models.oracle(model, tokens)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = _rounded(module.weight.data, kind)
    expected = random_models.oracle(model, tokens)

    found = _whole(_load(tmp_path, kind), tokens)

    def off(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).square().mean().sqrt() / other.std())

    assert off(found, expected) <= 0.1
    if kind == "int4":
        assert off(found, expected) < off(expected, plain) / 4


def test_sixteen_bit_weights_are_computed_as_stored(tmp_path: Path) -> None:
    """dtype auto keeps fp32 weights in fp32; asked for fp32, bf16 weights are widened exactly."""
    chosen = random_models.settings("qwen3", 4)
    model = random_models.write(tmp_path / "wide", "qwen3", chosen).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    tokenizer = (tmp_path / "wide" / "tokenizer.json").read_text()
    (tmp_path / "half" / "tokenizer.json").write_text(tokenizer)
    tokens = _tokens(6, 80)

    assert _load(tmp_path / "wide", "auto").dtype == "fp32"
    found = _whole(_load(tmp_path / "half", "fp32"), tokens)
    oracle = random_models.oracle(_reload(tmp_path / "half", torch.float32), tokens)
    assert _relative(found, oracle) <= TOLERANCE


def test_drawn_log_probabilities_are_those_of_the_raw_logits(tmp_path: Path) -> None:
    """Temperature, bias and penalties change what is drawn, not what is reported."""
    chosen = random_models.settings("llama", 8)
    model = random_models.write(tmp_path, "llama", chosen)
    runner = _load(tmp_path)
    tokens = _tokens(7, 50)
    sampling = SamplingParams(temperature=0.5, bias={9: 100.0}, presence=1.0, seed=3)
    sample = SamplingRequest(sampling, 0, 50, tokens, [9], (), 5)
    line = Line(Scatter(runner, random.Random(1)), tokens)

    drawn = runner.execute([line.next_rows(50, sample)])[0]

    expected = torch.log_softmax(random_models.oracle(model, tokens)[-1], -1)
    assert drawn is not None
    assert drawn.token == 9
    assert drawn.logprob == pytest.approx(float(expected[9]), abs=1e-4)
    best = expected.topk(5)
    assert [token for token, _ in drawn.top] == best.indices.tolist()
    assert [value for _, value in drawn.top] == pytest.approx(best.values.tolist(), abs=1e-4)
