"""GGUF files against the `gguf` package: the numbers and products of every type, logits, the shipped model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bench.engine import random_models
from bench.engine.stepping import Line, Scatter
from common.errors import ConfigError
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.models.decoders.compiled_decoder import CompiledDecoder, PackedLinear
from engine.models.decoders.files import find_decoder
from engine.models.gguf.blocks import dequantised
from engine.models.gguf.reader import TYPES, read_gguf
from engine.models.gguf.weights import StoredTensor
from tests.support import gguf_files
from tests.support.kernels import decoder_kernels

KERNELS = decoder_kernels()
FAMILIES = tuple(gguf_files.ARCHITECTURES)
SCALES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
LENGTH = 90


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _random_rows(kind: str, outputs: int, inputs: int, seed: int) -> Any:
    """Return rows of a type in which every bit but those of the scales is drawn."""
    draw = np.random.default_rng(seed)
    if kind not in SCALES:
        return gguf_files.quantised(draw.standard_normal((outputs, inputs), np.float32), kind)
    blocks = draw.integers(
        0, 256, (outputs * inputs // TYPES[kind].inputs, TYPES[kind].bytes), np.uint8
    )
    for at in SCALES[kind]:
        scales = draw.uniform(-0.01, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(outputs, -1)


def _stored(path: Path, kind: str, rows: Any) -> StoredTensor:
    """Return a tensor that lies in a file of its own."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("w.weight", rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    return StoredTensor(file, file.tensors["w.weight"], 0)


def _rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return inputs as the kernels round them: to bf16, or 32 of them to 127ths of the largest; F32 and F16: not."""
    if kind in {"F32", "F16"}:
        return x.double()
    if kind == "BF16":
        return x.to(torch.bfloat16).double()
    groups = x.view(len(x), -1, 32)
    scale = groups.abs().amax(2, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return ((groups * inverse).round() * scale).double().flatten(1)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(tuple(TYPES)),
    st.integers(1, 150),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 1 << 30),
)
def test_numbers_and_products(
    tmp_path: Path, kind: str, outputs: int, blocks: int, rows: int, seed: int
) -> None:
    """Blocks of any bits are the package's numbers, and products are theirs; a row's bits are its own."""
    inputs = blocks * (256 if TYPES[kind].inputs == 256 else 96)
    stored = _random_rows(kind, outputs, inputs, seed)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    tensor = _stored(tmp_path / "w.gguf", kind, stored)
    torch.manual_seed(seed)
    x = torch.randn(rows, inputs)

    assert np.array_equal(dequantised(kind, stored), expected)
    weight = tensor.numbers()
    product = _rounded(x, kind) @ weight.double().T
    size = _rounded(x, kind).abs() @ weight.abs().double().T
    for kernels in KERNELS:
        linear = PackedLinear(kernels, tensor, "stored", threads=2)
        assert torch.equal(linear.numbers(), weight)
        found = linear(x)
        assert ((found.double() - product).abs() <= 2e-6 * size + 1e-30).all()
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(linear(x[row : row + 1]), found[row : row + 1])


def _mixture(seed: int, kinds: tuple[str, ...] = gguf_files.TYPES) -> Callable[[str], str]:
    return lambda name: random.Random(f"{name} {seed}").choice(kinds)


def _only(kind: str) -> Callable[[str], str]:
    return lambda name: kind


def _oracle(file: Path, model: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logits of transformers' model with the weights that the package reads."""
    weights = gguf_files.dequantised(file, model.config.to_dict())
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return random_models.oracle(model, tokens)


def _load(file: Path, dtype: str = "auto", *, compiled: bool = True) -> TorchExecutor:
    return TorchExecutor.load(
        str(file), device="cpu", dtype=dtype, threads=2, kv_bytes=8 << 20, compiled=compiled
    )


def _logits(runner: TorchExecutor, tokens: list[int], *steps: int) -> torch.Tensor:
    """Return the logits of a sequence computed in steps of so many rows."""
    line = Line(Scatter(runner, random.Random(1)), tokens)
    return torch.cat([runner.logits([line.next_rows(rows)]) for rows in steps])


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(tmp_path: Path, family: str, seed: int) -> None:
    """A mixture of all types gives the logits of its weights in fp32, and rounded inputs stay near them."""
    chosen = gguf_files.settings(family, seed)
    model = random_models.write(tmp_path, family, chosen, seed=seed)
    file = gguf_files.write(tmp_path, tmp_path / "model.gguf", _mixture(seed))
    draw = random.Random(seed)
    tokens = [draw.randrange(random_models.VOCABULARY) for _ in range(LENGTH)]

    expected = _oracle(file, model, tokens)

    for compiled in (True, False):
        exact = _logits(_load(file, "fp32", compiled=compiled), tokens, LENGTH)
        assert _relative(exact, expected) <= 1e-4
    served = _load(file)
    assert served.dtype == "stored"
    found = _logits(served, tokens, LENGTH)
    bf16 = _logits(_load(file, "bf16"), tokens, LENGTH)
    assert (found - expected).square().mean() <= 4 * (bf16 - expected).square().mean() + 1e-6
    assert torch.equal(_logits(served, tokens, 1, 7, 32, 1, LENGTH - 41), found)
    decoder = served._decoder
    assert isinstance(decoder, CompiledDecoder)
    assert decoder.weight_bytes <= 1.1 * file.stat().st_size


def _demo_logits(model: str, tokens: list[int], dtype: str = "auto") -> torch.Tensor:
    return _logits(_load(Path(model), dtype), tokens, len(tokens))


def test_the_shipped_model_answers_alike(tmp_path: Path) -> None:
    """In F32 its logits are the same bits, with its tokenizer and templates; in Q8_0 and Q4_K its tokens mostly."""
    shipped = find_decoder("spillway-demo")
    text = "<|begin|><|user|>Which river feeds the mill? 1234 wheels<|end|><|assistant|>The mill at the river."
    original = Tokenizer.from_buffer(shipped.tokenizer_json())
    tokens = original.encode(text).ids
    expected = _demo_logits("spillway-demo", tokens)
    file = gguf_files.demo(tmp_path / "Spillway Demo.gguf", lambda _: "F32")

    found = find_decoder(str(file))

    assert found.name == "spillway-demo"
    for name in ("chat_template", "grounding_template", "bos", "eos", "stop_ids", "context"):
        assert getattr(found, name) == getattr(shipped, name), name
    assert found.sampling.temperature == shipped.sampling.temperature == 0
    assert Tokenizer.from_buffer(found.tokenizer_json()).encode(text).ids == tokens
    assert torch.equal(_demo_logits(str(file), tokens), expected)
    for kind, share in (
        ("Q8_0", 0.95),
        ("Q6_K", 0.9),
        ("Q5_K", 0.8),
        ("Q4_K", 0.7),
        ("IQ4_XS", 0.7),
    ):
        file = gguf_files.demo(tmp_path / f"{kind}.gguf", _only(kind))
        agreeing = _demo_logits(str(file), tokens).argmax(-1) == expected.argmax(-1)
        assert float(agreeing.float().mean()) >= share


def test_rotations(tmp_path: Path) -> None:
    """Llama 3's frequencies, which a file holds as divisors, and yarn's turn as transformers turns."""
    for rope in random_models.ROPES[1:]:
        chosen = gguf_files.settings("llama", 1) | {
            "rope_parameters": {"rope_theta": 10_000.0, **rope}
        }
        directory = tmp_path / str(rope["rope_type"])
        model = random_models.write(directory, "llama", chosen)
        factors = None
        if rope["rope_type"] == "llama3":
            plain = 10_000.0 ** -(np.arange(0, chosen["head_dim"], 2) / chosen["head_dim"])
            factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
        file = gguf_files.write(directory, directory / "m.gguf", lambda _: "F32", factors=factors)
        tokens = [random.Random(n).randrange(random_models.VOCABULARY) for n in range(LENGTH)]

        found = _logits(_load(file, "fp32"), tokens, LENGTH)

        assert _relative(found, _oracle(file, model, tokens)) <= 1e-4


def test_what_cannot_be_served(tmp_path: Path) -> None:
    """Without the kernels, inputs of another type, or a type of weights that files do not have, there is a sentence."""
    file = gguf_files.demo(tmp_path / "m.gguf", lambda _: "Q8_0")

    with pytest.raises(ConfigError, match="'stored': expected auto, fp32"):
        _load(file, "stored")
    assert _load(file, compiled=False).dtype == "fp32"
