"""G1P: what retrieval does for the RETRO-type model: perplexity by interval and staleness, and facts told."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from bench.document import BenchOptions, Body
from engine.models.retro.files import load_retro, load_tokenizer
from engine.models.retro.generation import RetroGenerator
from engine.models.retro.network import RetroNetwork
from models.retro.evaluate import (
    NOTHING,
    HeldOutTexts,
    facts_after,
    losses,
    mean95,
    perplexity,
    right_facts,
    said_after,
    similarity,
)
from models.retro.tokens import EncodedText

INTERVALS = (64, 32, 16, 8)
STALE = (0, 1, 2, 4, 8, 16, 32, 64)
TEXTS, STORED = 16, 200
TOKENS = 320  # generated for each text
LOWER = 0.95  # of the perplexity without retrieval
MARGIN, GAIN = 0.01, 0.10  # pipelined against sequential, and both against one retrieval
# Table 5.5 of the thesis, Wikipedia: similarity at staleness 1 … 64.
TABLE_5_5 = (0.9262, 0.9204, 0.9138, 0.9062, 0.8990, 0.8921, 0.8875)


class Mode(NamedTuple):
    """A way to generate: how often something is retrieved, and whether the next retrieval runs beside it."""

    name: str
    interval: int
    pipelined: bool = False


class _Row:
    """What all parts of a run share."""

    def __init__(self, body: Body, options: BenchOptions) -> None:
        self.body, self.options = body, options
        self.intervals = INTERVALS[:1] if options.quick else INTERVALS
        torch.set_num_threads(1)
        self.network: RetroNetwork = load_retro()
        self.tokenizer = load_tokenizer()
        self.embed = EncodedText(self.tokenizer)
        self.held = HeldOutTexts(
            self.tokenizer,
            self.embed,
            options.rounds(TEXTS, 2),
            options.pick(STORED, 12),
            self.network.config.chunk,
            options.seed,
        )

    def losses(self, interval: int, stale: int = 0) -> list[float]:
        """Return each text's loss at this interval and staleness, computed once."""
        kept = self.body.samples.setdefault("losses", {})
        name = f"{interval}/{stale}" if interval else "none"
        if name not in kept:
            kept[name] = losses(self.network, self.held, interval, stale)
        found: list[float] = kept[name]
        return found


def run(options: BenchOptions) -> Body:
    """Measure perplexities, similarity and facts (quick: two texts, a small database, few cells)."""
    body = Body()
    row = _Row(body, options)
    texts, chunks = len(row.held.texts), len(row.held.database)
    body.notes.append(
        f"{texts} texts of 512 tokens about entities that training never saw, whose facts stand only in a database of "
        f"{chunks:,} chunks of 64 tokens, in other words; MiniLM's vectors, exact search, 2 neighbours of 128 tokens. "
        "Perplexity is over the tokens after the first chunk, so every setting predicts the same; intervals (95 %) are "
        "bootstrapped over texts. No time is measured here."
    )
    _against_none(row)
    _staleness(row)
    _similar(row)
    _facts(row)
    return body


def _against_none(row: _Row) -> None:
    """Compare retrieval at each interval, fresh and pipelined, with none, and with another text's neighbours."""
    alone = row.losses(NOTHING)
    rows, worst = [["none", "-", f"{perplexity(alone):.3f}", "-"]], 0.0
    for interval in row.intervals:
        for name, stale in (("sequential", 0), ("pipelined", interval)):
            found = row.losses(interval, stale)
            gaps = mean95([ours - theirs for ours, theirs in zip(found, alone, strict=True)])
            low, high = map(math.exp, gaps)
            ratio = perplexity(found) / perplexity(alone)
            worst = max(worst, high)
            rows.append([
                str(interval), f"{name}, stale {stale}", f"{perplexity(found):.3f}",
                f"{ratio:.3f} [{low:.3f}, {high:.3f}]",
            ])  # fmt: skip
    wrong = losses(row.network, row.held, INTERVALS[0], wrong=True)
    row.body.samples["wrong"] = wrong
    rows.append([
        str(INTERVALS[0]), "neighbours of another text", f"{perplexity(wrong):.3f}",
        f"{perplexity(wrong) / perplexity(alone):.3f}",
    ])  # fmt: skip
    row.body.table(
        "Perplexity", ["interval", "retrieval", "perplexity", "by that of none [95 %]"], rows
    )
    row.body.met["retrieval lowers perplexity by 5 %"] = "goal" if worst <= LOWER else "missed"


def _staleness(row: _Row) -> None:
    """Print perplexity of every interval at every staleness."""
    stales = (0, 64) if row.options.quick else STALE
    rows = []
    for interval in row.intervals:
        cells = [f"{perplexity(row.losses(interval, stale)):.3f}" for stale in stales]
        rows.append([str(interval), *cells])
    columns = ["interval", *(f"stale {stale}" for stale in stales)]
    row.body.table(
        f"Perplexity by staleness (none: {perplexity(row.losses(NOTHING)):.3f})", columns, rows
    )


def _similar(row: _Row) -> None:
    """Compare what stale queries find with what fresh ones do, as found and shifted."""
    stales = (1, 64) if row.options.quick else STALE[1:]
    found: dict[str, list[float]] = {}
    rows = []
    for name, shifted in (("as found", False), ("shifted", True)):
        means = []
        for stale in stales:
            each = similarity(row.held, row.embed, INTERVALS[0], stale, shifted=shifted)
            row.body.samples[f"similar/{name}/{stale}"] = each
            means.append(float(np.mean(each)))
        found[name] = means
        rows.append([name, *(f"{mean:.4f}" for mean in means)])
    papers = dict(zip(STALE[1:], TABLE_5_5, strict=True))
    rows.append(["thesis, Wikipedia", *(f"{papers[stale]:.4f}" for stale in stales)])
    row.body.table(
        "Cosine of what a stale query finds with what a fresh one does, interval 64, 1 neighbour",
        ["content", *(f"stale {stale}" for stale in stales)],
        rows,
    )
    falls = found["as found"]
    slow = all(b <= a + 0.005 for a, b in pairwise(falls))
    first = 1 - falls[0] >= max([a - b for a, b in pairwise(falls)])
    row.body.met["similarity falls with staleness"] = "goal" if slow else "missed"
    row.body.met["similarity falls most at the first token"] = "goal" if first else "missed"


def _facts(row: _Row) -> None:
    """Generate reports and count the later facts that they state: alone, one retrieval, sequential, pipelined."""
    tokens = row.options.pick(TOKENS, 96)
    modes = [Mode("none", 0), Mode("once", tokens)]
    for interval in row.intervals[:3]:
        modes += [Mode("sequential", interval), Mode("pipelined", interval, pipelined=True)]
    shares = {mode: _told(row, mode, tokens) for mode in modes}
    rows = []
    for mode, each in shares.items():
        row.body.samples[f"facts/{mode.name}/{mode.interval}"] = each
        low, high = mean95(each)
        rows.append([
            mode.name, str(mode.interval or "-"), f"{np.mean(each):.1%} [{low:.1%}, {high:.1%}]",
        ])  # fmt: skip
    row.body.table(
        f"Later facts told rightly in {tokens} generated tokens",
        ["retrieval", "interval", "facts [95 %]"],
        rows,
    )
    mean = {mode: float(np.mean(each)) for mode, each in shares.items()}
    once = mean[modes[1]]
    pairs = [(mean[modes[n]], mean[modes[n + 1]]) for n in range(2, len(modes), 2)]
    level = all(beside >= after - MARGIN for after, beside in pairs)
    ahead = all(min(pair) >= once + GAIN for pair in pairs)
    row.body.met["pipelined tells as many facts as sequential, to a point"] = (
        "goal" if level else "missed"
    )
    row.body.met["both tell 10 points more than one retrieval"] = "goal" if ahead else "missed"


def _told(row: _Row, mode: Mode, tokens: int) -> list[float]:
    """Return, for each text, the share of its later facts that a generated one states.

    A pipelined retrieval is replayed in turn, with its staleness: the text is the same.
    """
    generator, network, out = RetroGenerator(row.network), row.network, list[float]()
    chunk = network.config.chunk
    retrieve = row.held.database.retriever(network.config.neighbours) if mode.interval else None
    for text in row.held.texts:
        prompt = text.tokens[:chunk]
        found = generator.generate(
            prompt,
            tokens,
            retrieve,
            mode.interval or tokens,
            mode.interval if mode.pipelined else 0,
            pipelined=False,
        )
        facts = facts_after(text, row.tokenizer, chunk, chunk + tokens)
        right = right_facts(facts, said_after(row.held, prompt, found))
        out.append(sum(right) / max(1, len(right)))
    return out
