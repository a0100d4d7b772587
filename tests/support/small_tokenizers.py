"""Small tokenizers of the kinds generators have, trained in a moment."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "Grüße aus Köln",
    "naïve café 🎉🎉",
    "日本語テキスト",
] * 3
SPECIAL = ["<|end|>", "<|user|>"]


@cache
def byte_level() -> bytes:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tag>", special=False)])
    return str(tokenizer.to_str()).encode()


@cache
def sentence_piece() -> bytes:
    """BPE with ▁ for spaces and one token a byte for the rest, as Llama 2 and Mistral have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "é", "▁a", "ab", "▁the", "."]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return str(tokenizer.to_str()).encode()


@cache
def metaspace() -> bytes:
    """Whole words with a metaspace decoder."""
    vocabulary = {
        word: number for number, word in enumerate(["<unk>", "▁a", "b", "▁", "▁▁", "c.", "é"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return str(tokenizer.to_str()).encode()
