"""The tokenizer of a GGUF file as a `tokenizer.json`: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama").

The file only names its pre-tokenizer. A pre-tokenizer of that name works here as in llama.cpp (`llama_vocab`), but with
the regular expressions of the models' own tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from common.errors import ConfigError
from engine.models.gguf.reader import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names that models give to tokens that end a turn; llama.cpp looks for the same names.
_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>",
        "</s>", "<EOT>", "<|eot|>",
    }
)  # fmt: skip


class PreTokenizer(NamedTuple):
    """The rule that splits a text before pairs are merged: a regular expression, or GPT-2's rule if empty."""

    expression: str = ""
    digits: bool = False  # each digit is a piece of its own
    whole_words: bool = False  # a piece that equals a token becomes that token, without merges
    bos: bool = False  # texts begin with the BOS token unless the file says otherwise
    nfc: bool = False


PRE_TOKENIZERS = {
    "default": PreTokenizer(),
    "gpt-2": PreTokenizer(),
    "olmo": PreTokenizer(),
    **dict.fromkeys(("smollm", "refact", "starcoder"), PreTokenizer(digits=True)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
        PreTokenizer(_LLAMA3, whole_words=True, bos=True),
    ),
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "gpt-4o": PreTokenizer(_GPT4O),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, bos=True),
}


def tokenizer_json(file: GgufFile) -> bytes:
    """Return the file's tokenizer as JSON; ConfigError if it is missing, of an unknown kind, or broken."""
    tokens, types = _tokens(file)
    kind = file.text("tokenizer.ggml.model", "")
    if kind == "gpt2":
        content = _byte_level(file, tokens, types)
    elif kind == "llama":
        content = _sentence_piece(file, tokens, types)
    else:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; supported are gpt2 and llama"
        )
    content["version"], content["truncation"], content["padding"] = "1.0", None, None
    content["added_tokens"] = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[number] != _USER,
        }
        for number, token in enumerate(tokens)
        if types[number] in {_CONTROL, _UNKNOWN, _USER} and token
    ]
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library documents no class of its errors
        reason = str(error).partition("\n")[0][:200]
        raise ConfigError(f"{file.path}: {reason}; expected a tokenizer") from error
    return text.encode()


def special_token(file: GgufFile, name: str) -> str:
    """Return the text of the `bos` or `eos` token, which begins or ends a text; empty if the file names none."""
    tokens, _ = _tokens(file)
    number = _id(file, name, tokens)
    return "" if number is None else tokens[number]


def stop_ids(file: GgufFile) -> list[int]:
    """Return the tokens that end a turn: first the tokens that the file declares, then tokens with well-known names."""
    tokens, types = _tokens(file)
    found = [_id(file, name, tokens) for name in ("eos", "eot")]
    found += [n for n, token in enumerate(tokens) if token in _ENDS and types[n] == _CONTROL]
    return list(dict.fromkeys(number for number in found if number is not None))


def _tokens(file: GgufFile) -> tuple[list[str], Sequence[int]]:
    """Return every token's text and type; ConfigError if there are more tokens than rows of the embedding."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{file.path}: tokenizer.ggml.tokens is missing; expected a vocabulary")
    types = _numbers(file, "token_type", len(tokens))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ConfigError(
            f"{file.path}: has {len(tokens)} tokens and embeds {embedding.shape[0]}; expected no more tokens"
        )
    return tokens, [_NORMAL] * len(tokens) if types is None else [int(each) for each in types]


def _numbers(file: GgufFile, name: str, count: int) -> Sequence[float] | None:
    """Return one number per token, or None if the file has no such array."""
    found: Any = file.metadata.get(f"tokenizer.ggml.{name}")
    if found is None:
        return None
    if not isinstance(found, np.ndarray) or len(found) != count or not np.isfinite(found).all():
        raise ConfigError(f"{file.path}: tokenizer.ggml.{name} is not one number for each token")
    numbers: Sequence[float] = found.tolist()
    return numbers


def _id(file: GgufFile, name: str, tokens: Sequence[str]) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(tokens):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.{name}_token_id is {value!r}; expected a token's number"
        )
    return value


def _flag(file: GgufFile, name: str, *, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ConfigError(f"{file.path}: tokenizer.ggml.{name} is no truth value")
    return value


def _byte_level(file: GgufFile, tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    name = file.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre is {name!r}; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ConfigError(f"{file.path}: tokenizer.ggml.merges is missing; expected a list")
    pairs = [merge.split(" ") for merge in merges]
    if not all(len(pair) == 2 for pair in pairs):
        raise ConfigError(f"{file.path}: a merge in tokenizer.ggml.merges is not two tokens")
    cuts: list[dict[str, Any]] = []
    if pre.digits:
        cuts.append({"type": "Digits", "individual_digits": True})
    if pre.expression:
        pattern = {"Regex": pre.expression}
        cuts.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    cuts.append(
        {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": not pre.expression,
        }
    )
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "post_processor": _post_processor(file, tokens, bos=pre.bos),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "model": _bpe(tokens, types, pairs) | {"ignore_merges": pre.whole_words},
    }


def _sentence_piece(file: GgufFile, tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    scores = _numbers(file, "scores", len(tokens))
    if scores is None:
        raise ConfigError(f"{file.path}: tokenizer.ggml.scores is missing; expected one a token")
    prefix = _flag(file, "add_space_prefix", default=True)
    pieces = {
        token: number
        for number, token in enumerate(tokens)
        if types[number] in {_NORMAL, _USER} and token
    }
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    spaces: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if prefix:
        spaces.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _id(file, "unknown", tokens)
    model = _bpe(tokens, types, _merges(pieces, scores)) | {
        "unk_token": None if unknown is None else tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": _BYTE in types,
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "post_processor": _post_processor(file, tokens, bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(pieces: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return the merges implied by SentencePiece's scores, derived as in transformers: the best piece first."""
    found = []
    for piece, number in pieces.items():
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        whole = [pair for pair in halves if pair[0] in pieces and pair[1] in pieces]
        whole.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        found += [(scores[number], *pair) for pair in whole]
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [[left, right] for _, left, right in found]


def _bpe(tokens: list[str], types: Sequence[int], merges: list[list[str]]) -> dict[str, Any]:
    vocabulary = {token: n for n, token in enumerate(tokens) if types[n] != _UNUSED}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _post_processor(file: GgufFile, tokens: Sequence[str], *, bos: bool) -> dict[str, Any] | None:
    """Return the post-processor that adds the BOS and EOS tokens, if the file asks for them."""
    first = special_token(file, "bos") if _flag(file, "add_bos_token", default=bos) else ""
    last = special_token(file, "eos") if _flag(file, "add_eos_token", default=False) else ""
    if not first and not last:
        return None

    def around(sequence: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": kind}}
        marks = [
            {"SpecialToken": {"id": each, "type_id": kind}} if each else None
            for each in (first, last)
        ]
        return [part for part in (marks[0], text, marks[1]) if part is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            text: {"id": text, "ids": [tokens.index(text)], "tokens": [text]}
            for text in (first, last)
            if text
        },
    }
