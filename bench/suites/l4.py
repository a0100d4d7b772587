"""L4: paged attention on the CPU, decode: bytes of keys and values a second, beside the bandwidth of the moment."""

from __future__ import annotations

import ctypes
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from bench.document import BenchOptions, Body
from bench.engine.helper_process import helper_process, wait_until
from bench.pairs import PairBlocks, measure_pairs
from bench.suites.engine_pairs import told
from common.devices import detect, show_cores
from common.errors import ConfigError
from common.pages.identity import PAGE
from common.transport.memory_segment import MemorySegment
from common.types.helper_address import HelperAddress
from engine.decoder.executor.host_attention import HostAttentionThread, HostSubBatch
from engine.decoder.executor.torch_executor import StepRows
from engine.host.helped_attention import helped
from engine.kernels.attention_plan import plan_groups
from engine.kernels.page_memory import PageMemory, page_bytes
from engine.kernels.reference_attention import paged_attention
from engine.models.decoders.compiled_decoder import PlannedAttention, attend_layers, load_kernels
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.spec import DecoderSpec
from loadgen import stats

CONTEXT, READ_BYTES = 2048, 512 << 20
_PATIENCE_S = 60.0  # a helper that is late would not be what is measured


class HeadShape(NamedTuple):
    """Sequences, and heads on heads of K and V, of a width."""

    name: str
    sequences: int
    heads: int
    kv_heads: int
    dim: int


SHAPES = (
    HeadShape("L, 32 streams", 32, 32, 8, 128),
    HeadShape("L, 1 stream", 1, 32, 8, 128),
    HeadShape("M, 32 streams", 32, 12, 4, 64),
    HeadShape("no grouped heads, 16 streams", 16, 8, 8, 128),
)


def run(options: BenchOptions) -> Body:
    """Measure decode attention over scattered bf16 pages of one layer, and reading memory, in pairs."""
    body, threads = Body(), detect().usable_cores
    kernels = load_kernels()
    if kernels is None:
        raise ConfigError("L4: there are no compiled kernels here; expected a C++ compiler")
    torch.set_num_threads(threads)
    memory = torch.ones(READ_BYTES // 4)
    rows = []
    for shape in SHAPES:
        pool, queries, q = _case(shape)
        nbytes = 2 * shape.sequences * CONTEXT * shape.kv_heads * shape.dim * pool.data.itemsize

        blocks = measure_pairs(
            partial(_attend, kernels, q, pool, queries, threads),
            partial(_read, kernels, memory, threads),
            pairs=options.rounds(300, 3),
        )
        each_s = median(blocks.ours) / len(pool.layers)
        moved = nbytes * len(pool.layers) / READ_BYTES
        pairs = zip(blocks.ours, blocks.theirs, strict=True)
        speeds = [moved * read_s / ours_s for ours_s, read_s in pairs]
        share = stats.interval(speeds)
        plain_s = _plain(_pool(shape, 1, packed=False), queries, q)
        rows.append(
            [
                shape.name, f"{nbytes / each_s / 1e9:.1f}", f"{READ_BYTES / median(blocks.theirs) / 1e9:.1f}",
                told(share), f"{nbytes / plain_s / 1e9:.1f}", f"{len(blocks.ours)} ({blocks.dropped})",
            ]
        )  # fmt: skip
        body.samples[shape.name] = blocks.samples()
        body.met[f"{shape.name}, share of the bandwidth"] = stats.verdict(share, 0.8, 0.45)
    columns = ["shape", "attention GB/s", "reading GB/s", "share [95 %]", "torch (gathered) GB/s"]
    columns.append("pairs (blocks dropped)")
    body.table(f"Decode over {CONTEXT} tokens of context in bf16 pages of {PAGE}", columns, rows)
    _measure_host(body, options, kernels, threads)
    _measure_helper(body, options, kernels, threads)
    body.notes.append(
        f"{threads} threads; reading: all of {READ_BYTES >> 20} MiB summed, with prefetching."
    )
    return body


def _measure_host(body: Body, options: BenchOptions, kernels: ctypes.CDLL, threads: int) -> None:
    """Measure attention on the host as steps in stages plan it, a layer a call, and reading its pages, in pairs."""
    rows = []
    for shape in SHAPES:
        pool, queries, _ = _case(shape, shared=True)
        # On this thread, as reading is: teams of two threads would wait for each other's cores.
        planned = PlannedAttention(
            kernels, _spec(shape), queries, [pool], threads=threads, even=True
        )
        joined = torch.randn(shape.sequences, shape.heads + 2 * shape.kv_heads, shape.dim)
        out = torch.empty(shape.sequences, shape.heads, shape.dim)
        blocks = measure_pairs(
            partial(_attend_there, planned, len(pool.layers), joined, out),
            partial(_read, kernels, pool.data.view(torch.float32).flatten(), threads),
            pairs=options.rounds(300, 3),
        )
        ours_s, read_s = median(blocks.ours), median(blocks.theirs)
        share = stats.interval([b / a for a, b in zip(blocks.ours, blocks.theirs, strict=True)])
        size = pool.data.nbytes
        rows.append(
            [
                shape.name, f"{size / ours_s / 1e9:.1f}", f"{size / read_s / 1e9:.1f}", told(share),
                f"{len(blocks.ours)} ({blocks.dropped})",
            ]
        )  # fmt: skip
        body.samples[f"{shape.name}, on the host"] = blocks.samples()
        body.met[f"{shape.name}, on the host, share of reading its pages"] = stats.verdict(
            share, 0.8, 0.45
        )
    columns = ["shape", "attention GB/s", "reading its pages GB/s", "share [95 %]"]
    columns.append("pairs (blocks dropped)")
    title = (
        "Attention on the host (NEO): keys and values appended, then attended, over shared pages"
    )
    body.table(title, columns, rows)


def _measure_helper(body: Body, options: BenchOptions, kernels: ctypes.CDLL, threads: int) -> None:
    """Measure attention by a helper process, and by a thread of this one over the same pages, in pairs."""
    rows = []
    for shape in SHAPES:
        layers, blocks = _helper_pairs(shape, kernels, threads, options.rounds(300, 3))
        ours_us, own_us = (median(each) / layers * 1e6 for each in (blocks.ours, blocks.theirs))
        ratio = stats.interval([b / a for a, b in zip(blocks.ours, blocks.theirs, strict=True)])
        count = f"{len(blocks.ours)} ({blocks.dropped})"
        rows.append([shape.name, f"{ours_us:,.0f}", f"{own_us:,.0f}", told(ratio), count])
        body.samples[f"{shape.name}, by a helper"] = blocks.samples()
    columns = ["shape", "by a helper us", "by a thread us", "as fast [95 %]"]
    columns.append("pairs (blocks dropped)")
    title = "A layer's attention on the host: by a helper process, and by a thread of the worker"
    body.table(title, columns, rows)


def _helper_pairs(
    shape: HeadShape, kernels: ctypes.CDLL, threads: int, pairs: int
) -> tuple[int, PairBlocks]:
    """Return how many layers a helper process and a thread attended to, and their times in pairs."""
    pool, queries, _ = _case(shape, shared=True)
    assert pool.segment is not None
    joined = torch.randn(shape.sequences, shape.heads + 2 * shape.kv_heads, shape.dim)
    out, layers = torch.empty(shape.sequences, shape.heads, shape.dim), len(pool.layers)
    own = HostAttentionThread(kernels, _spec(shape), [pool], threads=threads)
    with tempfile.TemporaryDirectory(prefix="spillway-l4-") as folder:
        address = HelperAddress(str(Path(folder) / "host.sock"))
        attention = helped(own, address, _spec(shape), [pool], pool.segment, threads=threads)
        attention.patience_s = _PATIENCE_S
        with helper_process(address, Path(folder), "--host-cores", show_cores(detect().cores)):
            wait_until(lambda: attention.listener.channel)
            blocks = measure_pairs(
                partial(_attend_elsewhere, attention.plan(queries), layers, joined, out),
                partial(_attend_elsewhere, own.plan(queries), layers, joined, out),
                pairs=pairs,
            )
        attention.close()
    if attention.layers["late"] or attention.layers["worker"]:
        raise ConfigError("L4: the helper died; expected one that attends to every layer")
    return layers, blocks


def _case(
    shape: HeadShape, *, shared: bool = False
) -> tuple[PageMemory, list[StepRows], torch.Tensor]:
    """Return pages in random order, as many layers as make 512 MiB, one decode row a sequence, and its heads."""
    each = CONTEXT // PAGE
    nbytes = 2 * shape.sequences * CONTEXT * shape.kv_heads * shape.dim * 2
    pool = _pool(shape, max(1, READ_BYTES // nbytes), packed=True, shared=shared)
    free = list(range(pool.pages))
    random.Random(1).shuffle(free)
    queries = [
        StepRows([CONTEXT - 1], [free[number * each : (number + 1) * each]])
        for number in range(shape.sequences)
    ]
    return pool, queries, torch.randn(shape.sequences, shape.heads, shape.dim)


def _pool(shape: HeadShape, layers: int, *, packed: bool, shared: bool = False) -> PageMemory:
    pages, dtype = shape.sequences * CONTEXT // PAGE, torch.bfloat16
    size = pages * page_bytes(_spec(shape), layers, dtype)
    segment = MemorySegment(size) if shared else None
    pool = PageMemory(
        _spec(shape), None, range(layers), pages, dtype=dtype,
        device=torch.device("cpu"), packed=packed, segment=segment,
    )  # fmt: skip
    pool.data.copy_(torch.randn(pool.data.shape[1:]).expand(pool.data.shape))
    return pool


def _spec(shape: HeadShape) -> DecoderSpec:
    config = {
        "model_type": "llama", "hidden_size": shape.heads * shape.dim, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "num_hidden_layers": 1, "intermediate_size": 1, "vocab_size": 1,
        "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    return parse_decoder(config, where="L4")


def _attend(
    kernels: ctypes.CDLL,
    q: torch.Tensor,
    pool: PageMemory,
    queries: list[StepRows],
    threads: int,
    _number: int,
) -> None:
    # layer after layer, so that no cache holds what the next one reads
    attend_layers(kernels, q, pool, queries, threads)


def _attend_there(
    planned: PlannedAttention, layers: int, joined: torch.Tensor, out: torch.Tensor, _number: int
) -> None:
    for layer in range(layers):
        planned.attend(0, layer, joined, out)


def _attend_elsewhere(
    batch: HostSubBatch, layers: int, joined: torch.Tensor, out: torch.Tensor, _number: int
) -> None:
    for layer in range(layers):
        batch.submit(0, layer, joined, out).wait()


def _read(kernels: ctypes.CDLL, memory: torch.Tensor, threads: int, _number: int) -> None:
    kernels.spillway_read(
        ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.numel()), threads
    )


def _plain(pool: PageMemory, queries: list[StepRows], q: torch.Tensor) -> float:
    """Return the seconds of one layer by the reference: pages gathered, then torch's fused attention."""
    plan, best = plan_groups(queries, [pool])[0], float("inf")
    rows = q.to(torch.bfloat16)
    for _ in range(3):
        began = time.perf_counter()
        paged_attention(rows, pool, 0, plan)
        best = min(best, time.perf_counter() - began)
    return best
