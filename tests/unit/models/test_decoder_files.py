"""A generator's files: what is read from them, and one clear sentence for whatever is missing or wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.engine import random_models
from common.errors import ConfigError
from common.types.generation import SamplingParams
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.files import DecoderFiles, find_decoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama's directory, never changed."""
    directory = tmp_path_factory.mktemp("models") / "Tiny Llama_1.1"
    chosen = {**random_models.settings("llama", 1), "tie_word_embeddings": True}
    random_models.write(directory, "llama", chosen, shards=3)
    return directory


@pytest.fixture
def directory(model: Path, tmp_path: Path) -> Path:
    """Return a copy of it that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / model.name))


def _edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, **changes}))

    return change


def _config(**changes: Any) -> Callable[[Path], None]:
    return _edit("config.json", **changes)


def _rope(**changes: Any) -> Callable[[Path], None]:
    return _config(rope_parameters={"rope_theta": 1e4, **changes})


def _truncate(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1000])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "unknown family": (_config(model_type="gpt2"), "'gpt2'; supported .* llama, qwen2, qwen3, mist"),
    "quantised": (_config(quantization_config={"bits": 4}), "quantization_config"),
    "activation": (_config(hidden_act="relu6"), "hidden_act is 'relu6'"),
    "heads": (_config(num_attention_heads=5, num_key_value_heads=2), "multiple of num_key_value"),
    "odd head": (_config(head_dim=7), "head_dim is 7; expected an even number"),
    "layers is text": (_config(num_hidden_layers="six"), "num_hidden_layers is 'six'"),
    "no layers": (_config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "bias is text": (_config(attention_bias="yes"), "attention_bias is 'yes'"),
    "epsilon": (_config(rms_norm_eps=0), "rms_norm_eps is 0"),
    "unknown rope": (_rope(rope_type="ntk", factor=2.0), "rope_type 'ntk'; supported are default"),
    "longrope": (_rope(rope_type="longrope"), "short_factor None; expected . numbers"),
    "old rope": (
        _config(rope_parameters=None, rope_scaling={"type": "ntk", "factor": 2.0}),
        "rope_scaling has rope_type 'ntk'",
    ),
    "rope by layer": (_rope(full_attention={}), "rope_parameters differs between layers"),
    "absurd layers": (_config(num_hidden_layers=10**9), "is 1000000000; expected at most 4096"),
    "absurd width": (_config(hidden_size=1 << 30), "hidden_size is .*; expected at most"),
    "absurd vocabulary": (_config(vocab_size=1 << 30), "vocab_size is .*; expected at most"),
    "no factor": (_rope(rope_type="linear"), "factor None; expected a positive number"),
    "bad theta": (_rope(rope_theta=-1), "rope_theta -1; expected a positive"),
    "frequencies": (
        _rope(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=1),
        "high_freq_factor must be larger",
    ),
    "partial": (_rope(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "rope is text": (_config(rope_parameters="linear"), "rope_parameters is 'linear'"),
    "more layers than weights": (_config(num_hidden_layers=9), "'model.layers.*' is missing"),
    "other shape": (_config(vocab_size=129), "has shape .*; expected"),
    "untied": (_config(tie_word_embeddings=False), "'lm_head.weight' is missing"),
    "shard is missing": (
        lambda d: sorted(d.glob("*.safetensors"))[1].unlink(), "model-00002-of-.*is missing"
    ),
    "truncated": (_truncate, "expected an intact safetensors file"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "expected a tokenizer"),
    "stop id": (_edit("generation_config.json", eos_token_id=[2, 999]), "eos_token_id has 999"),
    "temperature": (_edit("generation_config.json", temperature="hot"), "temperature is 'hot'"),
    "template": (_edit("tokenizer_config.json", chat_template=3), "chat_template is not text"),
    "name": (_config(spillway={"name": "No Good"}), "spillway.name is 'No Good'"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_models_are_refused_with_a_sentence(directory: Path, damage: str) -> None:
    """The error says where, what and what is expected."""
    change, complaint = DAMAGES[damage]
    change(directory)

    with pytest.raises(ConfigError, match=complaint) as caught:
        TorchExecutor.load(str(directory), device="cpu", threads=1, kv_bytes=1 << 20)

    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"device": "cuda"}, "device 'cuda': torch sees no CUDA device here"),
        ({"device": "sim"}, "device 'sim': a generator runs on cpu or cuda"),
        ({"dtype": "int3"}, "chat_dtype 'int3': expected auto, fp32, bf16, int8, int4"),
        (
            {"exact": True, "compiled": False},
            "SPILLWAY_EXACT: needs the compiled kernels of the CPU",
        ),
        ({"dtype": "int8", "compiled": False}, "chat_dtype 'int8': needs the compiled kernels"),
        ({"kv_bytes": 100}, "SPILLWAY_KV_BYTES is 100; expected 0, or at least"),
    ],
)
def test_what_cannot_be_had_is_said(
    model: Path, arguments: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are settings this machine or this model cannot serve."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    with pytest.raises(ConfigError, match=complaint):
        TorchExecutor.load(str(model), **{"device": "cpu", "threads": 1, **arguments})


@pytest.mark.parametrize("name", ["", "/no/such/place", "a/b/c", "org/not-downloaded-anywhere"])
def test_models_that_are_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub id is taken from the cache only; nothing is downloaded behind the user's back."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(
        ConfigError, match=f"model {name!r}: no such directory.*expected a directory"
    ):
        find_decoder(name)


def test_a_downloaded_hub_id_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache is read by its own layout."""
    commit = "a" * 40
    home = tmp_path / "models--org--Some_Model"
    shutil.copytree(model, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert find_decoder("org/Some_Model").name == "some-model"


def test_names(directory: Path) -> None:
    """A model is called by its own configuration, else by its directory."""
    assert find_decoder(str(directory)).name == "tiny-llama-1-1"

    _config(spillway={"name": "spillway-demo"}, _name_or_path="other")(directory)

    assert find_decoder(str(directory)).name == "spillway-demo"


def test_stop_ids_and_sampling(directory: Path) -> None:
    """generation_config.json comes first; do_sample false is greedy, absent it is as the client's default."""
    _config(eos_token_id=[2, 5])(directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 7, "do_sample": False, "temperature": 0.6}))
    greedy = find_decoder(str(directory))
    assert greedy.stop_ids == [7, 2, 5]
    assert greedy.sampling == SamplingParams(temperature=0.0)

    _edit("generation_config.json", do_sample=True, top_p=0.9, top_k=20, repetition_penalty=1.1)(
        directory
    )
    expected = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition=1.1)
    assert find_decoder(str(directory)).sampling == expected

    path.unlink()
    assert find_decoder(str(directory)).sampling == SamplingParams()
    assert find_decoder(str(directory)).stop_ids == [2, 5]


def test_templates_and_special_tokens(directory: Path) -> None:
    """Both places of a chat template are read, the file first; special tokens may be objects."""
    several = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    _edit("tokenizer_config.json", chat_template=several, bos_token={"content": "<s>"})(directory)
    _edit("special_tokens_map.json", eos_token="</s>")(directory)
    found = find_decoder(str(directory))
    assert (found.chat_template, found.bos, found.eos) == ("D", "<s>", "</s>")

    (directory / "chat_template.jinja").write_text("J")
    (directory / "grounding.jinja").write_text("G")
    found = find_decoder(str(directory))
    assert (found.chat_template, found.grounding_template) == ("J", "G")


def _print(files: DecoderFiles, kv_dtype: str = "fp32", layout: int = 1) -> str:
    return files.fingerprint(kv_dtype=kv_dtype, layout=layout)


def test_fingerprint_names_what_pages_depend_on(directory: Path) -> None:
    """Weights, KV type, rotation and layout change it; place, template and sampling do not."""
    first = find_decoder(str(directory))
    prints = {_print(first), _print(first, "bf16"), _print(first, layout=2)}
    _rope(rope_theta=123.0)(directory)
    prints.add(_print(find_decoder(str(directory))))
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    prints.add(_print(find_decoder(str(directory))))
    assert len(prints) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in prints)

    before = _print(find_decoder(str(directory)))
    (directory / "chat_template.jinja").write_text("J")
    moved = directory.rename(directory.with_name("moved"))
    assert _print(find_decoder(str(moved))) == before


def test_card_and_shape(directory: Path) -> None:
    """The card carries what a router needs; the context is no longer than the pages reach."""
    (directory / "chat_template.jinja").write_text("J")
    runner = TorchExecutor.load(str(directory), device="cpu", threads=1, kv_bytes=1 << 20)
    pages = (1 << 20) // sum(runner.shape.page_bytes)
    card = runner.card(created_ms=5, partitions=2)

    assert runner.shape.pages == pages
    assert runner.shape.context == min(random_models.CONTEXT, 32 * pages)
    assert (card.name, card.kind, card.family) == (runner.name, "generate", f"chat.{runner.name}")
    assert (card.max_tokens, card.partitions, card.created_ms) == (runner.shape.context, 2, 5)
    assert (card.chat_template, card.stop_ids) == ("J", [2])
    assert card.fingerprint == runner.fingerprint
    assert json.loads(runner.tokenizer_json())["truncation"] is None


BASE = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 9, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "given", "windows"),
    [
        ("llama", {"sliding_window": 7}, (None,) * 4),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {"sliding_window": 7}, (7,) * 4),
        ("qwen2", {"sliding_window": 7}, (None,) * 4),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True}, (None,) * 4),
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 7),
        ),
        (
            "qwen3",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
    ],
)
def test_windows_follow_each_familys_rule(
    family: str, given: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """What transformers makes of the same configuration."""
    import transformers

    spec = parse_decoder({"model_type": family, **BASE, **given}, where="here")

    assert spec.windows == windows
    theirs = transformers.AutoConfig.for_model(family, **{**BASE, **given})
    kinds = getattr(theirs, "layer_types", None)
    if kinds is not None:
        assert [window is not None for window in windows] == [
            kind == "sliding_attention" for kind in kinds
        ]
