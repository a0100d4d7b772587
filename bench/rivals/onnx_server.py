"""A thin server of OpenAI's embeddings over ONNX Runtime or OpenVINO, which have none of their own for texts.

`python onnx_server.py ENGINE TOKENIZER FILE THREADS SETTING --host H --port P` runs in their environment. Requests that
wait are computed together, up to the setting's batch; SETTING is a JSON object with the names of the engine's first of
SETTINGS, the others of which are what a sweep tries.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Words = Mapping[str, str | int]
Vectors = np.ndarray[Any, Any]
Compute = Callable[[Vectors, Vectors], Vectors]
SETTINGS: dict[str, tuple[Words, ...]] = {
    "onnxruntime": ({"file": "fused", "batch": 32}, {"file": "plain"}, {"file": "int8"}, {"batch": 8}),
    "openvino": (
        {"file": "plain", "precision": "bf16", "streams": 1, "batch": 32},
        {"precision": "f32"}, {"streams": 2}, {"batch": 8},
    ),
}  # fmt: skip
LONGEST = 256  # tokens, as sentence-transformers cuts


def onnxruntime(file: str, threads: int, _setting: Words) -> Compute:
    """Return ONNX Runtime's session on the CPU, all its optimizations on."""
    import onnxruntime as ort  # type: ignore[import-not-found]  # noqa: PLC0415 - in its environment only

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def openvino(file: str, threads: int, setting: Words) -> Compute:
    """Return OpenVINO's compiled model; each thread of the server has a request of its own."""
    import threading  # noqa: PLC0415

    import openvino as ov  # type: ignore[import-not-found]  # noqa: PLC0415 - in its environment only

    model = ov.Core().compile_model(
        file, "CPU",
        {
            "INFERENCE_PRECISION_HINT": setting["precision"], "NUM_STREAMS": str(setting["streams"]),
            "INFERENCE_NUM_THREADS": threads,
        },
    )  # fmt: skip
    local = threading.local()

    def compute(ids: Vectors, mask: Vectors) -> Vectors:
        if not hasattr(local, "request"):
            local.request = model.create_infer_request()
        found = local.request.infer({"input_ids": ids, "attention_mask": mask})
        rows: Vectors = found[model.output(0)].copy()
        return rows

    return compute


class Batches:
    """Texts that wait are tokenized and computed together, `streams` batches at a time."""

    def __init__(self, compute: Compute, tokenizer: Any, batch: int, streams: int) -> None:
        self._compute, self._tokenizer, self._batch = compute, tokenizer, batch
        self._pool = ThreadPoolExecutor(streams)
        self._waiting: asyncio.Queue[tuple[str, asyncio.Future[Vectors]]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._work()) for _ in range(streams)]

    async def encode(self, texts: list[str]) -> list[Vectors]:
        """Return one vector per text."""
        loop = asyncio.get_running_loop()
        asked = [(text, loop.create_future()) for text in texts]
        for each in asked:
            self._waiting.put_nowait(each)
        return list(await asyncio.gather(*(future for _, future in asked)))

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            taken = [await self._waiting.get()]
            while len(taken) < self._batch and not self._waiting.empty():
                taken.append(self._waiting.get_nowait())
            texts = [text for text, _ in taken]
            rows = await loop.run_in_executor(self._pool, self._rows, texts)
            for (_, future), row in zip(taken, rows, strict=True):
                if not future.done():
                    future.set_result(row)

    def _rows(self, texts: list[str]) -> Vectors:
        found = self._tokenizer.encode_batch(texts)
        ids = np.array([each.ids for each in found], np.int64)
        mask = np.array([each.attention_mask for each in found], np.int64)
        return self._compute(ids, mask).astype(np.float32)


def main() -> None:
    """Serve until a signal ends it."""
    from aiohttp import web  # noqa: PLC0415 - the environment's own
    from tokenizers import Tokenizer  # noqa: PLC0415

    engine, words, file, threads, given = sys.argv[1:6]
    setting: Words = json.loads(given)
    named = dict(zip(sys.argv[6::2], sys.argv[7::2], strict=True))
    tokenizer = Tokenizer.from_file(words)
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()
    compute = {"onnxruntime": onnxruntime, "openvino": openvino}[engine](
        file, int(threads), setting
    )
    batches: list[Batches] = []

    async def begin(_app: web.Application) -> None:
        streams = int(setting.get("streams", 1))
        batches.append(Batches(compute, tokenizer, int(setting["batch"]), streams))
        await batches[0].encode(["warm"] * 32)

    async def embeddings(request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        rows = await batches[0].encode(texts)
        data = [
            {
                "object": "embedding",
                "index": n,
                "embedding": base64.b64encode(row.tobytes()).decode(),
            }
            for n, row in enumerate(rows)
        ]
        return web.json_response({"object": "list", "data": data})

    async def health(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application(client_max_size=1 << 26)
    app.on_startup.append(begin)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_get("/health", health)
    web.run_app(app, host=named["--host"], port=int(named["--port"]), print=None)


if __name__ == "__main__":
    main()
