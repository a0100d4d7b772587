"""llama.cpp in a process of its own, fed by lines of JSON: runs in its own environment, which has llama_cpp.

`python llama_cpp_engine.py FILE THREADS STREAMS` answers {"decode": {"streams", "context", "steps"}} and
{"prefill": {"tokens"}} with {"seconds"}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

CONTEXT = 4096
BATCH = 512  # its default


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
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
