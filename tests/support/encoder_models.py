"""Small random models written as Hugging Face directories, with transformers as their author and oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 120
FAMILIES = ("bert", "xlm-roberta", "distilbert", "mpnet", "nomic_bert", "modernbert")
# Names of fields that a family has of its own.
_OWN = {
    "distilbert": {"intermediate_size": "hidden_dim", "hidden_act": "activation"},
    "modernbert": {"hidden_act": "hidden_activation"},
}


def save(directory: Path, family: str, *, labels: int = 0, **changes: Any) -> Any:
    """Write a random model of `family`, a `model_type`; return transformers' own, in eval mode."""
    import transformers

    torch.manual_seed(11)
    xlmr = family in {"xlm-roberta", "mpnet"}
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 66 if xlmr else 64,
        "type_vocab_size": 1 if xlmr else 2,
        "pad_token_id": 1 if xlmr else 0,
        "initializer_range": 0.3,
    }
    own = _OWN.get(family, {})
    settings = {own.get(name, name): value for name, value in settings.items()}
    settings |= {own.get(name, name): value for name, value in changes.items()}
    if family == "modernbert":
        settings |= {"local_attention": 14, "initializer_cutoff_factor": 9.0}
    if labels:
        settings["num_labels"] = labels
    config = transformers.AutoConfig.for_model(family, **settings)
    classes: Any = (
        transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    )
    model: Any = classes.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if family not in {"bert", "xlm-roberta"} and "norm.weight" in name.lower():
                weight.add_(torch.randn(weight.shape), alpha=0.3)
    model.save_pretrained(directory)
    words = {"[UNK]": 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def pooled(directory: Path, *, normalise: bool, **flags: bool) -> None:
    """Add sentence-transformers' files: pooling flags, and normalisation."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    kinds += [("Normalize", "2_Normalize")] if normalise else []
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(flags))


def texts(count: int = 7, longest: int = 40) -> list[list[int]]:
    """Return token lists of different lengths, some equal, not sorted."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + (number * 13) % longest for number in range(count - 1)] + [1]
    return [
        torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def hidden(model: Any, text: list[int], types: list[int] | None = None) -> torch.Tensor:
    """Return the oracle's hidden states of one text."""
    arguments = {"input_ids": torch.tensor([text])}
    if types is not None:
        arguments["token_type_ids"] = torch.tensor([types])
    with torch.inference_mode():
        states: torch.Tensor = model(**arguments).last_hidden_state[0]
    return states
