"""A cross-encoder that nobody trained: the default encoder's layers under a random head, to tell what reranking costs.

Its size is that of the small cross-encoders that people use (6 layers of 384); its scores mean nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from engine.models.encoders.files import find

NAME = "untrained-ranker"


def written(folder: Path) -> Path:
    """Write the model's directory into `folder`, and return it."""
    import torch  # noqa: PLC0415 - heavy, and only here
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    files, place = find(""), folder / NAME
    place.mkdir()
    config = json.loads((files.directory / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(files.directory / "tokenizer.json", place)
    (path,) = files.weights
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    hidden = config["hidden_size"]
    draw = torch.Generator().manual_seed(1)
    tensors["classifier.weight"] = torch.randn(1, hidden, generator=draw) / hidden**0.5
    tensors["classifier.bias"] = torch.zeros(1)
    tensors.setdefault("bert.pooler.dense.weight", torch.eye(hidden))
    tensors.setdefault("bert.pooler.dense.bias", torch.zeros(hidden))
    save_file(tensors, place / "model.safetensors")
    return place
