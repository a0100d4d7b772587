"""H1: chat over HTTP as one client feels it, the whole mesh against llama.cpp's server and vLLM's, same weights."""

from __future__ import annotations

import asyncio
from itertools import product

import msgspec

from bench.document import BenchOptions, Body, Rival
from bench.rivals import completion_servers as servers
from bench.rivals import llama_server
from bench.rivals.gguf_file import KINDS
from bench.rivals.sweep import Swept, best, distinct, joined, told
from bench.suites import h1_tables
from bench.workloads import divergence
from bench.workloads.chat_rounds import (
    DEVICE_TOKENS,
    LLAMA,
    NEW_TOKENS,
    ROUNDS,
    VLLM,
    ChatCell,
    ChatKept,
    ChatRounds,
)

CELL_S = 900.0  # of rounds in a cell; all of them are to take 12 hours at most
LENGTHS = 3
_LARGE = ((128, (1, 8, 32)), (2048, (1, 8)), (8192, (1,)))
PROMPTS = {"L": _LARGE, "M": _LARGE, "S": ((128, (1, 8, 32)), (1024, (1, 8)))}
QUICK = ChatCell("S", "bf16", 128, 1)
VERSIONS = {LLAMA: llama_server.VERSION, VLLM: "0.32.0"}
VLLM_SETTING = {"enable-prefix-caching": False, "block-size": servers.VLLM_BLOCK}


def run(options: BenchOptions) -> Body:
    """Measure all cells, those of short prompts first (quick: one cell of S, two rounds)."""
    rounds = ChatRounds(options, CELL_S)
    if not rounds.kept.divergence and not options.quick:
        texts = divergence.held_out(divergence.TEXTS)
        found = asyncio.run(divergence.measure(texts, ["int8", "int4"], options))
        rounds.kept.divergence = found
    asyncio.run(_all(rounds, options))
    known = rounds.kept.cells.keys() | rounds.kept.failed.keys()
    left = rounds.left if options.quick else sum(cell.name not in known for cell in cells())
    return describe(rounds.kept, options, left)


async def _all(rounds: ChatRounds, options: BenchOptions) -> None:
    for cell in [QUICK] if options.quick else cells(options.only):
        await rounds.measure(cell)


def cells(only: str = "") -> list[ChatCell]:
    """Return every cell whose name holds `only`: ordered by length of the prompt, then bits, then model."""
    found = [
        ChatCell(model, kind, prompt, streams)
        for length, kind, model in product(range(LENGTHS), KINDS, PROMPTS)
        for prompt, counts in PROMPTS[model][length : length + 1]
        for streams in counts
    ]
    return [cell for cell in found if only in cell.name]


def describe(kept: ChatKept, options: BenchOptions, left: int = 0) -> Body:
    """Turn what was measured into tables, verdicts and notes."""
    body = Body(samples=msgspec.to_builtins(kept, str_keys=True), left=left)
    measured = [(cell, kept.cells[cell.name]) for cell in cells() if cell.name in kept.cells]
    failed = [cell for cell in cells() if cell.name in kept.failed]
    h1_tables.add(body, measured, failed, kept.divergence)
    body.table(
        "Settings of llama.cpp's server, each tried on the best one before it",
        ["model", "weights", "prompt x streams", "setting", "tokens/s", ""],
        [row for group in kept.swept.items() for row in _swept(*group)],
    )
    body.notes += _notes(options, kept)
    tried = distinct([each.setting for some in kept.swept.values() for each in some])
    chosen = distinct([dict(best(some)) for some in kept.swept.values()])
    measures = {name for _, found in measured for name in found.sides}
    body.rivals += [
        Rival(LLAMA, VERSIONS[LLAMA], tried, joined(chosen), LLAMA in measures),
        Rival(VLLM, VERSIONS[VLLM], [VLLM_SETTING], VLLM_SETTING, VLLM in measures),
    ]
    return body


def _swept(group: str, tried: list[Swept]) -> list[list[str]]:
    """Return a row for each setting of a sweep."""
    model, kind, prompt = group.split("/")
    streams = ChatCell(model, kind, int(prompt), 1).sweeping().streams
    where = [model, KINDS[kind], f"{prompt} x {streams}"]
    chosen = best(tried)
    return [
        [*where, told(each.setting), f"{each.rate:.1f}" if each.rate else "-",
         "best" if each.setting == chosen else each.why.rpartition("\n")[2][:60]]
        for each in tried
    ]  # fmt: skip


def _notes(options: BenchOptions, kept: ChatKept) -> list[str]:
    rounds = (
        "A round: random prompts that no server has seen, sent at once by one client to one server after the other, "
        f"the same to each, in an order that turns every round, {NEW_TOKENS} greedy tokens each. All processes of a "
        "server are stopped (SIGSTOP) while another is measured; one that goes on first answers a short request. "
        "Tokens/s count from the first request sent to the last stream's end, prompts included."
    )
    count = (
        f"At most {options.rounds(ROUNDS, 2)} rounds a cell, fewer where they would take longer than {CELL_S / 60:g} "
        "minutes. Levels are judged by the targets' method: undecided where an interval is wider than 5 % to a side."
    )
    sides = (
        f"Ours: router, worker and both Redis on the same cores, {DEVICE_TOKENS:,} tokens of KV cache. llama.cpp: as "
        "many slots as streams, a cache for each, no cache of prompts, as many threads as cores."
    )
    reading = (
        "Ratios above 1 are to our advantage. A gap lies between two reads of a stream that brought tokens. int8 and "
        "int4 stand against Q8_0 and Q4_0: such a cell misses if the KL divergence of S's next tokens on its held-out "
        "text from its bf16 weights is larger than with the rival's format."
    )
    measured = kept.cells.values()
    notes = [rounds, count, sides, reading]
    if len(measured) < len(cells()):
        names = sorted({f"{cell.model} {cell.kind}" for cell in cells() if cell.name in kept.cells})
        notes.append(f"{len(measured)} of {len(cells())} cells were measured: {', '.join(names)}.")
    if compared := sum(found.compared for found in measured):
        alike = sum(found.alike for found in measured) / compared
        notes.append(f"{alike:.1%} of {compared} answers began with llama.cpp's token.")
    if len(commits := {found.commit[:12]: None for found in measured}) > 1:
        notes.append(f"Cells were measured at the commits {', '.join(commits)}.")
    notes += [f"{name} failed: {why}" for name, why in kept.failed.items()]
    return notes + [f"{name} was not measured: {why}" for name, why in kept.absent.items()]
