"""Train the model: `python -m models.retro.train`. Seeded; goes on from its last checkpoint.

The figures to watch are the losses with and without neighbours: the gap is what is copied from them. Neighbours are
found as they are when the model is used, by the last tokens before an interval, but by counts of rare tokens instead
of MiniLM, among the stored tellings of a few chronicles; a part of them was asked for by a stale query and shifted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from engine.models.retro.database import ChunkDatabase, values
from engine.models.retro.network import PAD, RetroConfig, RetroNetwork, parameters_of
from models.demo.tokens import Encoder
from models.retro.chronicles import chronicle
from models.retro.initial import initialise
from models.retro.tokens import CountedTokens

DIRECTORY: Final = Path(__file__).parent
SAVE_EVERY_S: Final = 180
PROBE_EVERY: Final = 50  # steps
STALE: Final = (0, 0, 0, 16, 32, 64)
WITHOUT: Final = 0.12  # of the sequences, which see no neighbours
WRONG: Final = 0.1  # of the neighbours, which are any chunks


class Examples:
    """Batches of texts with the neighbours found for them."""

    def __init__(self, encoder: Encoder, config: RetroConfig, length: int, batch: int) -> None:
        self._encoder, self._config = encoder, config
        self._length, self._batch = length, batch
        rng = random.Random("counted")
        sample = [encoder.text(chronicle(rng, "train").stored) for _ in range(200)]
        self._embed = CountedTokens(sample, config.vocabulary)

    def draw(
        self, seed: str, *, without: float = WITHOUT, same: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return ids [batch, length + 1], and neighbours [batch, retrievals, k, value] from token `chunk` on.

        Of the texts, a share `without` see no neighbours, and a share `same` are stored as they are.
        """
        config, rng = self._config, random.Random(seed)
        chunk, stale = config.chunk, rng.choice(STALE)
        told = [chronicle(rng, "train") for _ in range(3 * self._batch)]
        stored = [
            self._encoder.text(each.text if rng.random() < same else each.stored) for each in told
        ]
        database = ChunkDatabase(stored, chunk, self._embed)
        rows, windows = [], []
        for each in told[: self._batch]:
            ids = self._encoder.text(each.text)
            begin = rng.randint(0, max(0, min(chunk, len(ids) - self._length - 1)))
            ids = ids[begin : begin + self._length + 1]
            rows.append(ids + [PAD] * (self._length + 1 - len(ids)))
            for point in range(chunk, self._length, chunk):
                late = stale if point > chunk else 0
                windows.append(ids[max(0, point - late - chunk) : point - late] or ids[:1])
        found = database.search(windows, config.neighbours)
        per = len(windows) // self._batch
        out = []
        for n, numbers in enumerate(found):
            shift = stale if n % per else 0
            chunks = [
                database[rng.randrange(len(database)) if rng.random() < WRONG else number]
                for number in numbers
            ]
            out.append(values(chunks, config.neighbours, config.value, shift))
        neighbours = torch.tensor(out).view(self._batch, per, config.neighbours, config.value)
        blind = torch.tensor([rng.random() < without for _ in range(self._batch)])
        neighbours[blind] = PAD
        return torch.tensor(rows), neighbours


def loss_of(network: RetroNetwork, ids: Tensor, neighbours: Tensor) -> Tensor:
    """Return the loss of every predicted token [batch, length], computed in bfloat16; padding's is 0."""
    with torch.autocast("cpu", torch.bfloat16):
        chunk = network.config.chunk
        logits: Tensor = network(ids[:, :-1], neighbours, chunk, chunk)
    flat, targets = logits.float().flatten(0, 1), ids[:, 1:].flatten()
    return F.cross_entropy(flat, targets, ignore_index=PAD, reduction="none").view(len(ids), -1)


def same_at(progress: float) -> float:
    """Return the share of texts that are stored word for word: at first most, after 60 % of the time none.

    What copying is, is seen at once where the neighbour goes on as the text does; other words are learned from there.
    """
    return 0.7 * max(0.0, 1 - progress / 0.6)


def rate_at(progress: float, step: int, warm: int = 50) -> float:
    """Return the learning rate's factor: linear warm-up, constant, linear to zero in the last 60 %."""
    return min(1.0, (step + 1) / warm) * min(1.0, max(0.0, (1 - progress) / 0.6))


class Training:
    """One training run: network, optimiser, and how far it is; all of it is in the checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        encoder = Encoder.load()
        self.config = RetroConfig(vocabulary=encoder.tokenizer.get_vocab_size())
        self.examples = Examples(encoder, self.config, args.length, args.batch)
        self.net = RetroNetwork(self.config)
        initialise(self.net, args.seed)
        matrices = [p for n, p in self.net.named_parameters() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in self.net.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=args.rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0}
        self.path: Path = args.directory / "last.pt"
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            self.net.load_state_dict(saved["net"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.state = saved["state"]
        self.losses: list[float] = []

    def save(self) -> None:
        """Write the checkpoint; a crash in the middle leaves the one before."""
        part = self.path.with_suffix(".part")
        saved = {
            "net": self.net.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "state": self.state,
            "config": asdict(self.config),
        }
        torch.save(saved, part)
        part.replace(self.path)

    def learn(self) -> float:
        """Take one step; return the learning rate's factor."""
        state = self.state
        progress = state["seconds"] / (self.args.minutes * 60)
        factor = rate_at(progress, state["step"])
        for group in self.optimiser.param_groups:
            group["lr"] = self.args.rate * factor
        ids, neighbours = self.examples.draw(
            f"{self.args.seed} {state['step']}", same=same_at(progress)
        )
        loss: Any = loss_of(self.net, ids, neighbours).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.losses.append(float(loss.detach()))
        state["step"] += 1
        state["tokens"] += ids.numel() - len(ids)
        return factor

    @torch.no_grad()
    def probe(self) -> dict[str, float]:
        """Return the loss after the first chunk on other texts, with neighbours and without."""
        out = {"with": 0.0, "without": 0.0}
        for n in range(2):
            ids, neighbours = self.examples.draw(f"probe {n}", without=0)
            for name, given in (
                ("with", neighbours),
                ("without", torch.full_like(neighbours, PAD)),
            ):
                each = loss_of(self.net, ids, given)[:, self.config.chunk :]
                out[name] += float(each[each > 0].mean()) / 2
        return {name: round(value, 3) for name, value in out.items()}

    def go(self) -> Iterator[dict[str, Any]]:
        """Train until the time is used up, over all runs together; yield how far it is from time to time."""
        state, saved = self.state, self.state["seconds"]
        while state["seconds"] < self.args.minutes * 60:
            began = time.process_time()
            factor = self.learn()
            state["seconds"] += time.process_time() - began
            if state["step"] % PROBE_EVERY == 0:
                mean = sum(self.losses) / len(self.losses)
                self.losses = []
                yield {**state, "loss": round(mean, 4), "rate": round(factor, 3), **self.probe()}
            if state["seconds"] - saved > SAVE_EVERY_S:
                saved = state["seconds"]
                self.save()
        self.save()


def main() -> None:
    """Train until --minutes of processor time have been used, over all runs together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=448)
    parser.add_argument("--directory", type=Path, default=DIRECTORY / ".checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.directory.mkdir(parents=True, exist_ok=True)
    training = Training(args)
    about = {"parameters": parameters_of(training.net), **asdict(training.config)}
    for row in itertools.chain([about], training.go()):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
