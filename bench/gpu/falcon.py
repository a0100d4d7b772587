"""Delayed-synchronization traversal on an accelerator: queries walk a graph in step, by groups and candidates.

    python -m bench.gpu.falcon --device cuda --json falcon.json          # on the machine with the accelerator
    python -m bench.gpu.falcon --device cpu --tiny --json tiny.json      # a rehearsal

A round merges every query's oldest group and launches the next. More candidates in flight make fewer rounds of more
work, which is what an accelerator wants: it pays for each round, not for each node. Rows and graph are those of V3.
Resumable as `bench.gpu.chat`.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.gpu.record import AGAIN, Record, arguments
from bench.workloads import walk_graph
from bench.workloads.vectors import recall

ROWS, TINY = 1_000_000, 500
PAIRS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (4, 1), (6, 2), (4, 4))
BATCHES = (1, 16, 256)
EF, K, REPEATS = 64, 10, 5


class StepWalks:
    """Walks of a batch of queries through one graph, from one entry; `links` is (nodes, most links), -1 where none."""

    def __init__(self, vectors: torch.Tensor, links: torch.Tensor, entry: int) -> None:
        self._vectors, self._links, self._entry = vectors, links, entry

    def run(
        self, queries: torch.Tensor, ef: int, groups: int, candidates: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the nodes kept (queries, ef), nearest first, how many each query visited, and the rounds of all."""
        state = _Batch(self._vectors, self._links, queries, ef, groups, candidates)
        state.begin(self._entry)
        rounds = 0
        while bool((state.launched > state.merged).any()):
            state.merge()
            while bool(state.launch().any()):
                pass
            rounds += 1
        return state.nodes, state.visited.sum(1), rounds


class _Batch:
    def __init__(
        self, vectors: torch.Tensor, links: torch.Tensor, queries: torch.Tensor, ef: int, groups: int, candidates: int
    ) -> None:  # fmt: skip
        count, device = len(queries), queries.device
        self._vectors, self._links, self._queries = vectors, links, queries
        self._groups, self._candidates, self._ef = groups, candidates, ef
        self.nodes = torch.full((count, ef), -1, device=device)
        self._away = torch.full((count, ef), torch.inf, device=device)
        self._followed = torch.ones((count, ef), dtype=torch.bool, device=device)
        self.visited = torch.zeros((count, len(vectors) + 1), dtype=torch.bool, device=device)
        width = candidates * links.shape[1]
        self._flying = torch.full((count, groups, width), -1, device=device)
        self._flying_away = torch.full((count, groups, width), torch.inf, device=device)
        self.launched = torch.zeros(count, dtype=torch.long, device=device)
        self.merged = torch.zeros_like(self.launched)
        self._all = torch.arange(count, device=device)

    def begin(self, entry: int) -> None:
        """Launch the entry."""
        first = torch.full((len(self._all), 1), entry, device=self._all.device)
        self.nodes[:, :1], self._away[:, :1] = first, self._distances(first)
        self.visited[:, entry] = True
        picked = torch.full((len(self._all), self._candidates), -1, device=self._all.device)
        picked[:, :1] = first
        self._evaluate(picked, torch.ones_like(self._all, dtype=torch.bool))

    def merge(self) -> None:
        """Put what every query's oldest group found among its nearest."""
        flying = self.launched > self.merged
        place = self.merged % self._groups
        new, away = self._flying[self._all, place], self._flying_away[self._all, place]
        away = away.masked_fill(~flying[:, None], torch.inf)
        nodes = torch.cat([self.nodes, new], 1)
        self._away, order = torch.cat([self._away, away], 1).topk(self._ef, largest=False)
        self.nodes = nodes.gather(1, order)
        followed = torch.cat([self._followed, torch.isinf(away)], 1)
        self._followed = followed.gather(1, order)
        self.merged += flying

    def launch(self) -> torch.Tensor:
        """Launch a group of each query that has room and candidates; return which had."""
        room = self.launched - self.merged < self._groups
        places = torch.arange(self._ef, device=self._all.device).expand_as(self._followed)
        open_at, _ = places.masked_fill(self._followed, self._ef).topk(
            min(self._candidates, self._ef), largest=False
        )
        there = (open_at < self._ef) & room[:, None]
        at = open_at.clamp(max=self._ef - 1)
        picked = self.nodes.gather(1, at).masked_fill(~there, -1)
        marks = torch.zeros((len(at), self._ef + 1), dtype=torch.bool, device=at.device)
        marks.scatter_(1, open_at.masked_fill(~there, self._ef), there)
        self._followed |= marks[:, : self._ef]
        begins = there.any(1)
        self._evaluate(picked, begins)
        return begins

    def _evaluate(self, picked: torch.Tensor, begins: torch.Tensor) -> None:
        found = []
        for node in picked.T:  # in order: a node that two candidates lead to belongs to the first
            linked = self._links[node.clamp(min=0)]
            missing = (linked < 0) | (node < 0)[:, None]
            linked = linked.masked_fill(missing, len(self._vectors))
            fresh = ~self.visited.gather(1, linked) & ~missing
            self.visited.scatter_(1, linked, self.visited.gather(1, linked) | fresh)
            found.append(linked.masked_fill(~fresh, -1))
        nodes = torch.cat(found, 1)
        away = self._distances(nodes.clamp(min=0)).masked_fill(nodes < 0, torch.inf)
        place = self.launched % self._groups
        chosen = begins.nonzero()[:, 0]
        self._flying[chosen, place[chosen]] = nodes[chosen]
        self._flying_away[chosen, place[chosen]] = away[chosen]
        self.launched += begins

    def _distances(self, nodes: torch.Tensor) -> torch.Tensor:
        return -(self._vectors[nodes] * self._queries[:, None]).sum(2)


def measure(
    walks: StepWalks,
    queries: torch.Tensor,
    truth: Any,
    pair: tuple[int, int],
    batch: int,
    *,
    tiny: bool,
) -> dict[str, Any]:
    """Time batches of queries with one pair; count rounds, visited nodes and recall@10."""
    seconds, rows, rounds, visited = [], [], 0, 0.0
    for number in range(2 if tiny else REPEATS + 1):  # the first one warms
        some = queries[(number * batch) % len(queries) :][:batch]
        begin = (number * batch) % len(queries)
        if queries.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        nodes, seen, rounds = walks.run(some, EF, *pair)
        found = nodes[:, :K].cpu().numpy()
        if number:
            seconds.append(time.perf_counter() - began)
            rows.append(recall(found, truth[begin : begin + batch]))
            visited = float(seen.float().mean())
    return {
        "seconds": seconds,
        "rounds": rounds,
        "visited": visited,
        "recall": float(np.mean(rows)),
    }


def show(cells: dict[str, Any]) -> None:
    """Print a line a cell."""
    for name, cell in cells.items():
        print(
            f"{name:20} {1e3 * median(cell['seconds']):.3f} ms a batch, {cell['rounds']} rounds, "
            f"{cell['visited']:.0f} visited, recall@10 {cell['recall']:.3f}"
        )


def main(argv: list[str] | None = None) -> int:
    """Measure what is not measured yet: 0 done, 3 cells are left for another run."""
    args = arguments(__doc__, argv)
    record = Record(args.json, args.device, args.minutes)
    cells = {
        f"{pair[0]}/{pair[1]}, batch {batch}": (pair, batch)
        for pair in (PAIRS[:1] + PAIRS[4:5] if args.tiny else PAIRS)
        for batch in ((1, 4) if args.tiny else BATCHES)
    }
    if record.wants(*cells):
        count = TINY if args.tiny else ROWS
        made = walk_graph.make(count, 1, args.json.parent / "walks", lambda: True)
        if made is None:
            print("no kernel for this processor: the graph cannot be built here", file=sys.stderr)
            return AGAIN
        links, entry = walk_graph.lowest(made.graph)
        device = torch.device(args.device)
        vectors = torch.from_numpy(made.rows.view.matrix[:count]).to(device)
        walks = StepWalks(vectors, torch.from_numpy(links).to(device), entry)
        queries = torch.from_numpy(made.queries).to(device)
        with torch.inference_mode():
            for name, (pair, batch) in cells.items():
                record.fill(
                    name, partial(measure, walks, queries, made.truth, pair, batch, tiny=args.tiny)
                )
    show(record.cells)
    return record.status()


if __name__ == "__main__":
    sys.exit(main())
