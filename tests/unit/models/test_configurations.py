"""Odd configurations: models that are what transformers makes of them, or refused in a sentence; never otherwise."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from bench.engine import random_models
from bench.engine.stepping import Line, Scatter
from common.errors import ConfigError, InvalidRequest
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.output.detokenizer import Vocabulary
from engine.models.encoders.encoder import Encoder
from services.router.text.requests import encode_all
from services.router.text.tokens import TextEncoder
from tests.conftest import PROFILE, SEED
from tests.support import encoder_models

EACH = 200 if PROFILE == "soak" else 14  # odd configurations of a family
LENGTH = 90
TOLERANCE = 1e-4
Config = dict[str, Any]
T = TypeVar("T")


def _older(config: Config, draw: random.Random) -> None:
    """Name the rotation as files did before rope_parameters."""
    rope = config.pop("rope_parameters", None)
    if not isinstance(rope, dict) or "full_attention" in rope:
        return
    config["rope_theta"] = rope.pop("rope_theta", 10_000.0)
    if draw.random() < 0.5:
        rope["type"] = rope.pop("rope_type", "default")
    config["rope_scaling"] = rope


def _beside(config: Config, draw: random.Random) -> None:
    """Give both names, which contradict each other."""
    config["rope_scaling"] = draw.choice(
        (None, {}, {"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 2.0})
    )
    if draw.random() < 0.3:
        config["rope_theta"] = draw.choice((500.0, None, 20_000))


def _scaled(config: Config, draw: random.Random) -> None:
    """Take another kind of rotation."""
    pairs = 8
    ropes: list[Config] = [
        {"rope_type": "dynamic", "factor": draw.choice((2.0, 2.7, 1))},
        {"type": "dynamic", "factor": 4.0},
        {"rope_type": "linear", "factor": 8, "type": "yarn"},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": None, "beta_fast": 20},
        {"rope_type": "yarn", "factor": None},
        {"rope_type": "default", "factor": 3.0, "partial_rotary_factor": 0.5},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "ntk", "factor": 2.0},
        {"rope_type": None},
        {"rope_theta": 300.0},
        {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + n / 9 for n in range(pairs)],
            "long_factor": [3.0] * draw.choice((pairs, pairs, 3)),
            "factor": draw.choice((None, 4.0)),
        },
    ]
    config[draw.choice(("rope_parameters", "rope_scaling"))] = draw.choice(ropes)
    if draw.random() < 0.5:
        config["rope_theta"] = 30_000.0


def _trained(config: Config, draw: random.Random) -> None:
    """Say beside the rotation, within it, or in both places what context the model was first trained for."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and draw.random() < 0.7:
        rope["original_max_position_embeddings"] = draw.choice((64, 128, 256))
    if draw.random() < 0.7:
        config["original_max_position_embeddings"] = draw.choice((64, 200, 512))


def _windowed(config: Config, draw: random.Random) -> None:
    """Change who has a window, and how long it is."""
    layers = 3
    for key, values in (
        ("use_sliding_window", (True, False, None)),
        ("sliding_window", (None, 17, 40)),
        ("max_window_layers", (0, 1)),
        ("layer_types", (None, ["sliding_attention"] * layers, ["full_attention"] * (layers - 1))),
    ):
        if draw.random() < 0.5:
            config[key] = draw.choice(values)
        elif draw.random() < 0.3:
            config.pop(key, None)


def _tied(config: Config, draw: random.Random) -> None:
    config["tie_word_embeddings"] = not config.get("tie_word_embeddings", False)


def _silent(config: Config, draw: random.Random) -> None:
    """Leave fields out, or say null."""
    for key in draw.sample(sorted({*config} - {"model_type", "rope_parameters"}), 3):
        if draw.random() < 0.7:
            config.pop(key)
        else:
            config[key] = None


def _own(config: Config, draw: random.Random) -> None:
    """Change fields that one family knows, in all."""
    for key, values in (
        ("partial_rotary_factor", (0.5, 1.0)),
        ("attn_logit_softcapping", (None, 5.0)),
        ("final_logit_softcapping", (None, 5.0)),
        ("query_pre_attn_scalar", (7, 100)),
        ("rope_local_base_freq", (500.0, 10_000.0)),
        ("sliding_window_pattern", (1, 3)),
        ("no_rope_layers", (None, [1, 0, 1, 0, 1, 0], [0])),
        ("no_rope_layer_interval", (1, 2)),
        ("attention_multiplier", (0.1,)),
        ("residual_multiplier", (0.5,)),
        ("embedding_multiplier", (3.0,)),
        ("logits_scaling", (2, 3.0)),
        ("hidden_act", ("gelu", "gelu_new", "swish")),
        ("hidden_activation", ("gelu", "silu", None)),
        ("use_bidirectional_attention", (None, True, False)),
    ):
        if draw.random() < 0.25:
            config[key] = draw.choice(values)


ODDITIES: tuple[Callable[[Config, random.Random], None], ...] = (
    _older, _beside, _scaled, _trained, _windowed, _tied, _silent, _own,
)  # fmt: skip


def _executor(directory: Path) -> TorchExecutor:
    return TorchExecutor.load(
        str(directory), device="cpu", dtype="fp32", threads=1, kv_bytes=4 << 20
    )


def _encoder(directory: Path) -> Encoder:
    return Encoder.load(str(directory), device="cpu", dtype="fp32", threads=1)


def _loaded(load: Callable[[Path], T], directory: Path) -> T | None:
    """Return a model, or None if it is refused in a sentence that names the file."""
    try:
        return load(directory)
    except ConfigError as error:
        sentence = str(error)
    assert str(directory) in sentence
    return None


def _theirs(directory: Path, tokens: list[int]) -> torch.Tensor | str:
    """Return transformers' logits of a model, or why there are none."""
    import transformers

    try:
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        model = load(directory, dtype=torch.float32)
        return random_models.oracle(model.eval(), tokens)
    except Exception as error:  # noqa: BLE001 - it documents none
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("family", random_models.FAMILIES)
def test_odd_configurations(tmp_path: Path, family: str) -> None:
    """Every one gives the logits of transformers, or a sentence that names the file and the field."""
    torch.set_num_threads(1)
    draw = random.Random(f"{family} {SEED}")
    tokens = [draw.randrange(random_models.VOCABULARY) for _ in range(LENGTH)]
    equal = 0
    chosen = {**random_models.settings(family, 3), "num_hidden_layers": 3}
    chosen |= {"hidden_size": 16 * chosen["num_attention_heads"], "tie_word_embeddings": False}
    chosen |= {"head_dim": 16} if "head_dim" in chosen else {}
    random_models.write(tmp_path, family, chosen)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    for number in range(EACH):
        config = copy.deepcopy(plain)
        for change in draw.sample(ODDITIES, draw.choice((1, 1, 2, 3))):
            change(config, draw)
        path.write_text(json.dumps(config))
        runner = _loaded(_executor, tmp_path)
        if runner is None:
            continue
        some = tokens[: runner.shape.context]
        line = Line(Scatter(runner, random.Random(1)), some)
        found = runner.logits([line.next_rows(len(some))])
        theirs = _theirs(tmp_path, some)
        if isinstance(theirs, str):
            continue  # transformers refuses a field that counts for nothing, such as a null initializer_range
        worst = (found - theirs).abs().amax(-1) / theirs.abs().amax(-1)
        assert float(worst.max()) <= TOLERANCE, f"{number}: {float(worst.max())}\n{config}"
        equal += 1
    assert equal


def _odd_encoder(directory: Path, family: str, draw: random.Random) -> None:
    """Write a random encoder with sentence-transformers' files, odd in some of them."""
    from sentence_transformers.base.modules import Dense

    place = directory / draw.choice(("", "0_Transformer"))
    pad = 1 if family in {"xlm-roberta", "mpnet"} else 0
    decoder = draw.random() < 0.15
    encoder_models.save(place, family, **({"is_decoder": True} if decoder else {}))
    words = {"<pad>": pad, "[UNK]": 1 - pad, **{f"w{n}": n for n in range(2, 60)}}
    words |= {f"W{n}": 58 + n for n in range(2, 60)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>"])
    steps = draw.choice((None, normalizers.NFC(), normalizers.Sequence([normalizers.Lowercase()])))
    if steps is not None:
        tokenizer.normalizer = steps
    tokenizer.save(str(place / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "[UNK]"}
    (place / "tokenizer_config.json").write_text(json.dumps(own | {"model_max_length": 40}))
    fields: Config = {"max_seq_length": draw.choice((None, 12))}
    if draw.random() < 0.6:
        fields["do_lower_case"] = draw.choice((True, True, False))
    (place / "sentence_bert_config.json").write_text(json.dumps(fields))
    kinds = [("Transformer", place.name if place != directory else ""), ("Pooling", "1_Pooling")]
    for number in range(draw.choice((0, 0, 1, 2))):
        kinds.append(("Dense", f"{number + 2}_Dense"))
        (directory / kinds[-1][1]).mkdir()
        layer = Dense(
            24 if number else 64, 24, bias=draw.random() < 0.5,
            activation_function=draw.choice((torch.nn.Tanh(), torch.nn.Identity(), torch.nn.ELU())),
        )  # fmt: skip
        layer.save(str(directory / kinds[-1][1]))
    kinds += [("Normalize", "9_Normalize")] if draw.random() < 0.5 else []
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    pooling: Config = {
        "embedding_dimension": 64,
        "pooling_mode": draw.choice(("cls", "mean", ["max"], ["cls", "mean"])),
    }
    if draw.random() < 0.3:
        pooling = {"word_embedding_dimension": 64, "pooling_mode_max_tokens": True}
    if draw.random() < 0.3:
        pooling["include_prompt"] = draw.choice((True, False))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    described: Config = {"prompts": {"query": "w3 W4 ", "passage": "W5 ", "none": None}}
    if draw.random() < 0.6:
        described["default_prompt_name"] = draw.choice(
            ("query", "passage", "document", "none", "other", None)
        )
    (directory / "config_sentence_transformers.json").write_text(json.dumps(described))


@pytest.mark.parametrize("family", encoder_models.FAMILIES)
def test_odd_encoders(tmp_path: Path, family: str) -> None:
    """Every one gives the vectors of sentence-transformers, or a sentence that names the file and the field."""
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    draw = random.Random(f"{family} {SEED}")
    texts = [
        "w7",
        "w9 W8 w11 w12",
        "W10 <pad> w12 <pad> w3",
        "w2 nothing <PAD>",
        " ".join(["w6 W7"] * 9),
    ]
    equal = 0
    for number in range(EACH):
        directory = tmp_path / str(number)
        _odd_encoder(directory, family, draw)
        encoder = _loaded(_encoder, directory)
        if encoder is None:
            continue
        card = encoder.card()
        tokenizer = TextEncoder(Tokenizer.from_str(encoder.tokenizer_json().decode()))
        lists = encode_all(
            tokenizer,
            texts,
            card.max_tokens,
            truncate=True,
            param="input",
            prompt=card.default_prompt,
        )
        theirs = SentenceTransformer(str(directory), device="cpu").encode(texts)
        assert np.abs(encoder.encode(lists) - theirs).max() <= TOLERANCE, number
        equal += 1
    assert equal


def test_a_vocabulary_with_holes() -> None:
    """Ids that no token has, within the tokenizer or beyond it, are taken where the model has a vector for them."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "w": 9, "v": 30}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder, decoder = TextEncoder(tokenizer), Vocabulary(tokenizer.to_str().encode())

    encoder.check_ids([30, 4, 0], 0, "prompt", 0)
    encoder.check_ids([30, 39], 0, "prompt", 40)
    for ids, known in (([31], 0), ([40], 40), ([30], 20), ([-1], 40)):
        with pytest.raises(InvalidRequest, match="holds a token id outside"):
            encoder.check_ids(ids, 0, "prompt", known)
    stream = decoder.stream()
    pieces = [stream.push(token) for token in (9, 4, 30, 39)] + [stream.flush()]
    assert "".join(pieces) == tokenizer.decode([9, 30])
