"""llama.cpp in a process of its own, fed by lines of JSON: runs in its own environment, which has llama_cpp and gguf.

`python llama_cpp_engine.py write MODEL FILE bf16|int8|int4` makes a GGUF of a Hugging Face directory;
`python llama_cpp_engine.py serve FILE THREADS` answers {"decode": {"streams", "context", "steps"}} and
{"prefill": {"tokens"}} with {"seconds"}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
CONTEXT = 4096
BATCH = 512  # its default


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
    import gguf  # type: ignore[import-not-found]  # noqa: PLC0415 - in its environment only

    config = json.loads((directory / "config.json").read_text())
    chosen = gguf.GGMLQuantizationType[KINDS[kind]]
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
        new = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 1:
            writer.add_tensor(new, np.ascontiguousarray(values))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(values), chosen)
            writer.add_tensor(new, packed, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Model:
    """A loaded GGUF with room for many sequences, driven by llama.cpp's own batches."""

    def __init__(self, path: Path, threads: int, streams: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]  # noqa: PLC0415 - in its environment only

        self._library, self._filled = llama_cpp, (0, 0)
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx = max(CONTEXT, streams * 512)
        wanted.n_batch = wanted.n_ubatch = BATCH
        wanted.n_seq_max = streams
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, wanted)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def clear(self) -> None:
        """Forget all sequences."""
        self._filled = (0, 0)
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), 1)

    def run(self, rows: list[tuple[int, int, int]], *, logits: bool) -> list[int]:
        """Compute (token, position, sequence) rows, at most BATCH; return the likeliest token after each, if asked."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, (token, position, sequence) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, position, 1
            batch.seq_id[n][0] = sequence
            batch.logits[n] = logits or n == len(rows) - 1
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        found = []
        for n in range(len(rows)) if logits else ():
            at = self._library.llama_get_logits_ith(self._context, n)
            found.append(int(np.ctypeslib.as_array(at, shape=(self.vocabulary,)).argmax()))
        return found

    def fill(self, streams: int, context: int) -> list[int]:
        """Begin sequences of random tokens, or go back to them; return a token for each to go on with."""
        if self._filled == (streams, context):
            memory = self._library.llama_get_memory(self._context)
            for sequence in range(streams):
                self._library.llama_memory_seq_rm(memory, sequence, context, -1)
            return [1] * streams
        self.clear()
        self._filled = (streams, context)
        draw = np.random.default_rng(1)
        for sequence in range(streams):
            tokens = draw.integers(0, self.vocabulary, context)
            for at in range(0, context, BATCH):
                some = enumerate(tokens[at : at + BATCH], at)
                self.run(
                    [(int(token), position, sequence) for position, token in some], logits=False
                )
        return [1] * streams

    def decode(self, streams: int, context: int, steps: int) -> float:
        """Return the seconds of `steps` greedy steps of all streams, from `context` tokens on."""
        tokens = self.fill(streams, context)
        began = time.perf_counter()
        for step in range(steps):
            rows = [(token, context + step, n) for n, token in enumerate(tokens)]
            tokens = self.run(rows, logits=True)
        return time.perf_counter() - began

    def prefill(self, tokens: int) -> float:
        """Return the seconds until the first token after a prompt."""
        self.clear()
        draw = np.random.default_rng(1).integers(0, self.vocabulary, tokens)
        began = time.perf_counter()
        for at in range(0, tokens, BATCH):
            some = enumerate(draw[at : at + BATCH], at)
            self.run([(int(token), position, 0) for position, token in some], logits=False)
        return time.perf_counter() - began


def serve(path: Path, threads: int, streams: int) -> None:
    """Answer lines until standard input ends."""
    began = time.perf_counter()
    model = Model(path, threads, streams)
    print(json.dumps({"started_s": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        ((what, arguments),) = json.loads(line).items()
        print(json.dumps({"seconds": getattr(model, what)(**arguments)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        serve(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
