"""The embedding path on an accelerator: texts/s and accuracy of each precision, on random weights made here.

    python -m bench.gpu.embeddings --device cuda --json out.json     # on the machine with the accelerator
    python -m bench.gpu.embeddings --device cpu --tiny --json out.json

Resumable: a cell that is in the JSON already is not measured again.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from engine.encoder.model import Floats
from engine.models.encoders.encoder import Encoder
from engine.models.encoders.family import parse_spec
from engine.models.encoders.weights import wanted

SHAPES: dict[str, dict[str, int]] = {
    "minilm": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    },
}
LENGTHS = (32, 128)
BATCHES = (1, 32, 256)


def make_model(directory: Path, shape: str, seed: int = 7) -> None:
    """Write a BERT directory of random weights: config, safetensors, tokenizer."""
    vocabulary = 1000 if shape == "tiny" else 30_522
    config: dict[str, Any] = {
        "model_type": "bert",
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        **SHAPES[shape],
    }
    (directory / "config.json").write_text(json.dumps(config))
    spec = parse_spec(config, pooling="mean", normalise=True, where="config.json")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in wanted(spec):
        noise = torch.randn(size, generator=generator) * 0.04
        tensors[name] = 1 + noise if name.endswith("LayerNorm.weight") else noise
    save_file(tensors, directory / "model.safetensors")
    words = {"[UNK]": 0, **{f"w{n}": n for n in range(1, vocabulary)}}
    Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(directory / "tokenizer.json"))


def texts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return random token lists."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocabulary) for _ in range(length)] for _ in range(count)]


def seconds_per_batch(encoder: Encoder, batch: list[list[int]], repeats: int) -> list[float]:
    """Return the wall seconds of each repeat, results on the host; two warm-ups are not counted."""
    samples = []
    for turn in range(repeats + 2):
        began = time.perf_counter()
        encoder.encode(batch)
        if turn >= 2:
            samples.append(time.perf_counter() - began)
    return samples


def cosines(left: Floats, right: Floats) -> Floats:
    """Return the cosine of each pair of rows."""
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    result: Floats = (left * right).sum(axis=1) / norms
    return result


def measure(directory: Path, device: str, shape: str, done: dict[str, Any], save: Any) -> None:
    """Fill in the cells of one shape that are not done yet."""
    vocabulary = 1000 if shape == "tiny" else 30_522
    exact = Encoder.load(str(directory), device=device, dtype="fp32")
    for dtype in ("fp32", "bf16"):
        encoder = (
            exact if dtype == "fp32" else Encoder.load(str(directory), device=device, dtype=dtype)
        )
        for length in LENGTHS:
            for count in BATCHES:
                cell = f"{shape}/{dtype}/{length}/{count}"
                if cell in done:
                    continue
                batch = texts(count, length, vocabulary, seed=length * 1000 + count)
                samples = seconds_per_batch(encoder, batch, repeats=5 if shape == "tiny" else 30)
                cosine = cosines(exact.encode(batch), encoder.encode(batch))
                done[cell] = {
                    "texts_per_s": count / float(np.median(samples)),
                    "seconds": samples,
                    "cosine_min": float(cosine.min()),
                    "cosine_median": float(np.median(cosine)),
                }
                save()


def main() -> int:
    """Measure every cell of the chosen shapes and write the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: one tiny shape")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch sees no CUDA device here; rehearse with --device cpu --tiny"
        )
    record: dict[str, Any] = (
        json.loads(args.json.read_text()) if args.json.exists() else {"cells": {}}
    )
    record["date"] = dt.datetime.now(dt.UTC).date().isoformat()
    record["device"] = (
        torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    )
    record["torch"] = torch.__version__
    for shape in ("tiny",) if args.tiny else ("minilm", "large"):
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory), shape)
            measure(
                Path(directory),
                args.device,
                shape,
                record["cells"],
                lambda: args.json.write_text(json.dumps(record, indent=1)),
            )
    for cell, row in record["cells"].items():
        print(f"{cell:24} {row['texts_per_s']:10.1f} texts/s   cosine min {row['cosine_min']:.6f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
