"""GGUF tokenizers against the originals on texts of many scripts, and one sentence for whatever is wrong in a file."""

from __future__ import annotations

import contextlib
import json
import random
import re
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from common.errors import ConfigError
from engine.models.decoders.files import find_decoder
from engine.models.gguf.reader import read_gguf
from engine.models.gguf.tokenizer import tokenizer_json
from engine.models.gguf.weights import stored_weights
from tests.support import gguf_files

TEXTS = [
    "The mill's wheel turned 12345 times; we'll see, they'RE sure.\r\n\n  Indented\ttext   with   spaces ",
    "Größe, naïve café, ÀÉÎ, ﬁne ligatures, e\u0301 decomposed",
    "Быстрая коричневая лиса 2026 года", "敏捷的棕色狐狸跳过懒狗, 共１２３次. ", "素早い茶色の狐とテキスト",
    "빠른 갈색 여우", "الثعلب البني السريع ٣٤٥", "השועל החום המהיר", "तेज़ भूरी लोमड़ी", "สุนัขจิ้งจอกสีน้ำตาล",
    "🦊🏽‍🚀 emoji 👩‍👩‍👧 and ∑∫√ math", "def f(x):\n    return x**2  # code\n\n\n", "", " ", "\n", "a", "don't CAN'T",
]  # fmt: skip
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>"]


def _trained(pre: pre_tokenizers.PreTokenizer, *, whole_words: bool = False) -> dict[str, Any]:
    """Return a byte-level tokenizer trained on the texts, as the content of its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


def _cut(expression: str) -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(expression), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


def _qwen(content: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer that cuts and normalizes texts as transformers' Qwen2 does."""
    backend = Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
    original = _of(content)
    original.normalizer, original.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    return original


def _of(content: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content))


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])


def _original(pre: str) -> tuple[dict[str, Any], Tokenizer]:
    """Return a tokenizer trained with what transformers does under a pre-tokenizer's name, its content and itself."""
    if pre in {"gpt-2", "olmo", "smollm", "refact", "qwen2"}:
        content = _trained(_DIGITS if pre in {"smollm", "refact"} else _GPT2)
        return content, _qwen(content) if pre == "qwen2" else _of(content)
    whole_words = pre in {"llama-bpe", "tekken"}
    content = _trained(_cut(GGUF_PRE_TOKENIZER_SPLITS[pre]), whole_words=whole_words)
    return content, _of(content)


def _written(path: Path, metadata: Callable[[GGUFWriter], None]) -> Path:
    """Write a file that holds a tokenizer and no model."""
    writer = GGUFWriter(str(path), "llama")
    metadata(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _samples() -> list[str]:
    """Return the texts, random mixtures of their characters, and texts with special tokens among them."""
    draw = random.Random(1)
    letters = "".join(TEXTS)
    mixed = ["".join(draw.choices(letters, k=draw.randrange(1, 60))) for _ in range(150)]
    special = ["<|begin|>Hello<|user|> a<tool>b <|end|>\n", "<|user|><|user|> x"]
    return TEXTS + mixed + special


@pytest.mark.parametrize(
    "pre", ["gpt-2", "olmo", "smollm", "refact", "llama-bpe", "tekken", "qwen2", "dbrx", "gpt-4o"]
)
def test_byte_level_tokenizers(tmp_path: Path, pre: str) -> None:
    """Ids and texts are those of the original under each name of a pre-tokenizer."""
    content, original = _original(pre)

    def metadata(writer: GGUFWriter) -> None:
        gguf_files.byte_level(writer, content, pre)
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)

    file = read_gguf(_written(tmp_path / "t.gguf", metadata))
    found = Tokenizer.from_buffer(tokenizer_json(file))

    for text in _samples():
        ids = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        assert found.encode(text).ids == [0, *ids]
        for skip in (True, False):
            assert found.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )


@cache
def _pieces() -> tuple[list[str], list[float], list[int]]:
    """Return SentencePiece's pieces, scores and types: learnt merges, single characters, bytes."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=450, show_progress=False, limit_alphabet=150)
    learner.train_from_iterator(TEXTS * 3, trainer)
    content = json.loads(learner.to_str())["model"]
    merged = ["".join(pair) for pair in content["merges"]]
    single = [each for each in content["vocab"] if each not in set(merged)]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{n:02X}>" for n in range(256)),
        *merged,
        *single,
        "<|user|>",
    ]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    types += [kinds.NORMAL] * (len(merged) + len(single)) + [kinds.CONTROL]
    ranks = [float(-n) for n in range(len(merged) + len(single))]
    return pieces, [0.0] * 259 + ranks + [0.0], [int(kind) for kind in types]


def _sentence_piece(text: str) -> list[int]:
    """Return the ids that SentencePiece's own algorithm gives: the best pair of neighbours is joined, and so on."""
    pieces, scores, types = _pieces()
    ids = {piece: n for n, piece in enumerate(pieces) if types[n] == gguf.TokenType.NORMAL}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        n
        for part in parts
        for n in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])
    ]


def test_sentence_piece_tokenizers(tmp_path: Path) -> None:
    """Ids are those of SentencePiece's algorithm over pieces and scores; special tokens cut a text."""
    pieces, scores, types = _pieces()

    def metadata(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        for name, number in (("bos", 1), ("eos", 2), ("unk", 0)):
            getattr(writer, f"add_{name}_token_id")(number)

    file = read_gguf(_written(tmp_path / "t.gguf", metadata))
    found = Tokenizer.from_buffer(tokenizer_json(file))

    for text in _samples():
        if not text or "<|" in text:
            continue
        ids = _sentence_piece(text)
        assert found.encode(text).ids == [1, *ids], text
        assert found.decode(ids) == text
    user = pieces.index("<|user|>")
    ids = found.encode("a<|user|>the mill", add_special_tokens=False).ids
    assert ids == [*_sentence_piece("a"), user, *_sentence_piece("the mill")]
    assert found.decode(ids, skip_special_tokens=False) == "a<|user|> the mill"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a small sound file."""
    path = gguf_files.demo(tmp_path_factory.mktemp("gguf") / "demo.gguf", lambda _: "Q4_0")
    return path.read_bytes()


def _read(path: Path) -> None:
    """Read everything that a start reads before it packs weights."""
    found = find_decoder(str(path))
    found.tokenizer_json()
    assert found.gguf is not None
    for stored in stored_weights(found.gguf, found.spec).values():
        if not hasattr(stored, "numel"):
            stored.rows()


def _key(name: str, value: bytes) -> Callable[[bytes], bytes]:
    """Return a change of the bytes that follow a key of the metadata: its type, and its value."""
    return lambda data: _after(data, name, 0, value)


def _at(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + value + data[offset + len(value) :]


def _tensor(name: str, skip: int, value: bytes) -> Callable[[bytes], bytes]:
    """Return a change of what follows a tensor's name: dimensions (4 bytes), sizes (8 each), type (4), offset (8)."""
    return lambda data: _after(data, name, skip, value)


def _after(data: bytes, name: str, skip: int, value: bytes) -> bytes:
    key = struct.pack("<Q", len(name)) + name.encode()
    at = data.index(key) + len(key) + skip
    return data[:at] + value + data[at + len(value) :]


U32, U64, HUGE = "<I", "<Q", struct.pack("<Q", 1 << 62)
TOKENS = "tokenizer.ggml.tokens"
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "does not begin with GGUF"),
    "another file": (lambda data: b"PK\x03\x04" + data, "does not begin with GGUF"),
    "magic alone": (lambda data: data[:4], "ends within its header"),
    "version 1": (_at(4, struct.pack(U32, 1)), "has version 1; expected .* 2 or 3"),
    "big-endian": (_at(4, struct.pack(">I", 3)), "is big-endian"),
    "no header": (lambda data: data[:20], "ends within its header"),
    "half a header": (lambda data: data[:5000], "for which it is too small|within"),
    "weights cut off": (lambda data: data[:-5000], "beyond the end; expected a file that was written"),
    "tensors": (_at(8, HUGE), "names 4611686018427387904 tensors"),
    "entries": (_at(16, struct.pack(U64, 1 << 20)), "names 1048576 metadata entries"),
    "a key without end": (_at(24, HUGE), "'a key' has 4611686018427387904 bytes"),
    "an entry's type": (_key("llama.block_count", struct.pack(U32, 77)), "is of type 77"),
    "an array of arrays": (
        _key(TOKENS, struct.pack("<II", 9, 9)), "is an array of type 9; expected one of numbers",
    ),
    "a vocabulary without end": (
        _key(TOKENS, struct.pack("<II", 9, 8) + HUGE), "has 4611686018427387904 strings",
    ),
    "numbers without end": (
        _key("tokenizer.ggml.token_type", struct.pack("<II", 9, 5) + HUGE), "4611686018427387904 numbers",
    ),
    "layers": (_key("llama.block_count", struct.pack("<II", 4, 1 << 31)), "block_count is 2147483648"),
    "many layers": (_key("llama.block_count", struct.pack("<II", 4, 900)), "900, of which the file has no"),
    "no heads": (_key("llama.attention.head_count", struct.pack("<II", 4, 0)), "head_count is 0; expected"),
    "heads": (_key("llama.attention.head_count", struct.pack("<II", 4, 7)), "must be a multiple of"),
    "width": (_key("llama.embedding_length", struct.pack("<II", 4, 1 << 30)), "hidden_size is 1073741824; expected"),
    "partial rotation": (
        _key("llama.rope.dimension_count", struct.pack("<II", 4, 16)), "dimension_count is 16; expected 32",
    ),
    "architecture": (
        _key("general.architecture", struct.pack("<IQ", 8, 5) + b"gemma"), "'gemma'; supported are llama, qwen2",
    ),
    "tokenizer": (_key("tokenizer.ggml.model", struct.pack("<IQ", 8, 4) + b"bert"), "'bert'; supported are gpt2"),
    "pre-tokenizer": (
        _key("tokenizer.ggml.pre", struct.pack("<IQ", 8, 6) + b"mammut"), "'mammut'; supported are default, gpt-2",
    ),
    "end of text": (
        _key("tokenizer.ggml.eos_token_id", struct.pack("<II", 4, 5000)), "eos_token_id is 5000; expected",
    ),
    "a tensor's dimensions": (_tensor("output_norm.weight", 0, struct.pack(U32, 9)), "has 9 dimensions"),
    "a tensor's size": (_tensor("output_norm.weight", 4, HUGE), "beyond the end"),
    "no numbers": (_tensor("output_norm.weight", 4, struct.pack(U64, 0)), "has shape .0,.; expected multiples"),
    "a type": (_tensor("blk.0.attn_q.weight", 20, struct.pack(U32, 11)), "is Q3_K; expected F32"),
    "an unknown type": (_tensor("blk.0.attn_q.weight", 20, struct.pack(U32, 999)), "is of type 999"),
    "an offset": (_tensor("blk.0.attn_q.weight", 24, HUGE), "beyond the end"),
    "one on another": (_tensor("blk.0.attn_q.weight", 24, struct.pack(U64, 0)), "on another"),
    "crooked": (_tensor("blk.0.attn_q.weight", 24, struct.pack(U64, 33)), "not aligned"),
    "no tensor": (_tensor("blk.0.attn_q.weight", -8, b"x"), "'model.layers.0.self_attn.q_proj.weight' is missing"),
    "a merge": (lambda data: _after(data, "tokenizer.ggml.merges", 24, b"~"), "expected a tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_malformed_files(tmp_path: Path, demo: bytes, name: str) -> None:
    """Whatever is wrong is told in one sentence, before memory is taken for what a file claims to hold."""
    change, sentence = DAMAGES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(change(demo))
    tracemalloc.start()

    with pytest.raises(ConfigError, match=sentence) as raised:
        _read(path)

    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_numbers_that_are_none(tmp_path: Path, demo: bytes) -> None:
    """A scale that is not finite is found before anything is computed."""
    (path := tmp_path / "model.gguf").write_bytes(demo)
    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    infinite = np.float16(np.inf).tobytes()
    path.write_bytes(demo[: tensor.offset] + infinite + demo[tensor.offset + 2 :])

    with pytest.raises(
        ConfigError, match=re.escape("'blk.1.ffn_down.weight' holds NaN or infinity")
    ):
        _read(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage(tmp_path: Path, demo: bytes, data: st.DataObject) -> None:
    """Bytes changed, cut out or put in anywhere: the file is read, or refused with one kind of error."""
    content = bytearray(demo)
    header = demo.index(b"blk.4.ffn_up.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        piece = data.draw(st.binary(min_size=0, max_size=9))
        content[at : at + data.draw(st.integers(0, 9))] = piece
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with contextlib.suppress(ConfigError):
        _read(path)
