"""Models that are missing, damaged or not ours end in one sentence that says what and where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from engine.models.encoders.encoder import Encoder
from engine.models.encoders.files import find, model_name
from tests.support import encoder_models


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return an intact small model."""
    encoder_models.save(tmp_path, "bert")
    encoder_models.pooled(tmp_path, normalise=True, pooling_mode_mean_tokens=True)
    return tmp_path


def _config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _write(name: str, content: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(content)


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _module(kind: str, path: str = "") -> str:
    return json.dumps([{"type": f"x.{kind}", "path": path}])


def _dense(**config: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
        modules = [{"type": f"x.{kind}", "path": path} for kind, path in kinds]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "2_Dense").mkdir()
        (directory / "2_Dense" / "config.json").write_text(json.dumps(config))

    return change


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "config is no JSON": (_write("config.json", "{"), "expected a readable JSON file"),
    "config is a list": (_write("config.json", "[]"), "expected a JSON object"),
    "config is binary": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "readable JSON"),
    "config is deep": (_write("config.json", "[" * 200_000), "readable JSON|JSON object"),
    "unknown family": (_config(model_type="gpt2"), "model_type is 'gpt2'"),
    "family is no text": (_config(model_type=["bert"]), "model_type"),
    "unknown activation": (_config(hidden_act="swish"), "hidden_act is 'swish'"),
    "relative positions": (_config(position_embedding_type="relative_key"), "position_embedding"),
    "heads do not divide": (_config(num_attention_heads=3), "multiple of num_attention_heads"),
    "no layers": (_config(num_hidden_layers=0), "at least 1"),
    "layers is text": (_config(num_hidden_layers="six"), "num_hidden_layers is 'six'"),
    "epsilon": (_config(layer_norm_eps="small"), "layer_norm_eps"),
    "more layers than weights": (_config(num_hidden_layers=4), "is missing"),
    "other shape": (_config(vocab_size=121), "has shape"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
    "truncated weights": (_truncate, "intact safetensors"),
    "weights are text": (_write("model.safetensors", "hello"), "intact safetensors"),
    "causal": (_config(is_decoder=True), "is_decoder is True"),
    "no such prompt": (
        _write("config_sentence_transformers.json", '{"default_prompt_name": "task"}'),
        "default_prompt_name is 'task'; expected one of query, document",
    ),
    "prompts are numbers": (
        _write("config_sentence_transformers.json", '{"prompts": {"query": 3}}'), "texts by name"
    ),
    "prompts are not pooled": (
        _write("1_Pooling/config.json", '{"include_prompt": false}'), "include_prompt is False"
    ),
    "two poolings": (_write("1_Pooling/config.json", '{"pooling_mode": ["cls", "mean"]}'), "pooling"),
    "dense of other sizes": (_dense(in_features=3, out_features=4), "in_features is 3; expected 64"),
    "dense of any activation": (
        _dense(in_features=64, out_features=4, activation_function="os.system"),
        "activation_function is 'os.system'; expected torch.nn's Tanh",
    ),
    "dense with a residual": (
        _dense(in_features=64, out_features=4, use_residual=True), "use_residual is True; expected"
    ),
    "dense without weights": (
        _dense(in_features=64, out_features=4), "2_Dense: model.safetensors is missing"
    ),
    "order of modules": (_write("modules.json", _module("Normalize")), "modules are Normalize; expected"),
    "index of lists": (
        _write("model.safetensors.index.json", '{"weight_map": {"a": ["b", "c"]}}'), "a weight_map"
    ),
    "index of nothing": (
        _write("model.safetensors.index.json", '{"weight_map": {"a": ""}}'), "a weight_map"
    ),
    "absurd width": (_config(hidden_size=1 << 40), "hidden_size is .*; expected"),
    "unknown module": (_write("modules.json", _module("LSTM")), "modules are LSTM; expected Trans"),
    "modules is a dict": (_write("modules.json", '{"a": 1}'), "list of modules"),
    "path leaves": (_write("modules.json", _module("Transformer", "../..")), "leaves the directory"),
    "unknown pooling": (_write("1_Pooling/config.json", '{"pooling_mode": "lasttoken"}'), "pooling"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_models_are_explained(damage: str, directory: Path) -> None:
    """Each damage ends the load with a ConfigError that names it."""
    spoil, sentence = DAMAGES[damage]
    spoil(directory)
    with pytest.raises(ConfigError, match=sentence):
        Encoder.load(str(directory), dtype="fp32")


def test_damaged_tokenizer_is_explained(directory: Path) -> None:
    """A missing tokenizer is named when it is asked for."""
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        find(str(directory)).tokenizer_json()


def test_tokenizer_neither_truncates_nor_pads(directory: Path) -> None:
    """The published tokenizer leaves length to the router, whatever the file says."""
    content = json.loads(find(str(directory)).tokenizer_json())

    assert (content["truncation"], content["padding"]) == (None, None)


@pytest.mark.parametrize("model", ["/no/such/directory", "no such model", "a/b/c", "../x"])
def test_missing_models_are_explained(model: str) -> None:
    """A name that is neither directory nor hub id says what was expected."""
    with pytest.raises(ConfigError, match=re.escape(repr(model))):
        find(model)


def test_hub_offline_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id that is neither cached nor reachable ends in a sentence, not a stack trace."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="could not be had from the Hugging Face hub"):
        find("nobody/no-such-model-here")


def test_cuda_where_there_is_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--device cuda without a CUDA device is refused with what to use."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cpu"):
        Encoder.load(str(directory), device="cuda")


def test_names() -> None:
    """Names are slugs that can be part of a family."""
    names = {
        model_name(model) for model in ("", "minilm", "sentence-transformers/all-MiniLM-L6-v2")
    }

    assert names == {"minilm"}
    assert model_name("BAAI/bge-small-en-v1.5") == "bge-small-en-v1-5"
    assert model_name("/models/My Encoder/") == "my-encoder"
