"""Train the model: `python -m models.demo.train`. Seeded; goes on from its last checkpoint.

The figure to watch is `page`: answers right to the letter where every distractor states the same
relation of another entity. The loss alone does not show whether names are told apart.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn

from models.demo.batches import Batch, batches, collate
from models.demo.export import state_of
from models.demo.network import Network, Size, initialise, parameters_of, rotations
from models.demo.tokens import DIRECTORY, END, PAD, Encoder, build
from models.demo.world.conversations import Shape, conversation

PROBES: Final = {
    "one": Shape((5, 5), (1, 1), (6, 6), refuse=0.0, follow=0.0, one_kind=1.0),
    "page": Shape((5, 5), (2, 4), (6, 6), page=1.0, refuse=0.0, follow=0.0, one_kind=1.0),
    "none": Shape((5, 5), (2, 4), (6, 6), page=1.0, refuse=1.0, follow=0.0, one_kind=1.0),
}
SAVE_EVERY_S: Final = 300
PROBE_EVERY_TOKENS: Final = 200_000
OTHER: Final = 0.1  # weight of the tokens the model does not say, during the first 8M tokens


def logits_of(net: Any, size: Size, batch: Batch) -> Tensor:
    """Return the logits of the batch's rows, computed in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = rotations(size, batch.positions)
        out: Tensor = net(batch.ids, cos.bfloat16(), sin.bfloat16(), batch.rows)
    return out.float()


@torch.no_grad()
def probe(net: Network, encoder: Encoder, count: int = 24) -> dict[str, float]:
    """Return the share of answers of which every token is right, given the right ones before it.

    The conversations are new ones of the training pool, the same at each call.
    """
    out = {}
    for name, shape in PROBES.items():
        rng = random.Random(f"probe {name}")
        right: list[bool] = []
        for _ in range(0, count, 6):
            talks = [encoder.conversation(conversation(rng, shape)) for _ in range(6)]
            examples = [(ids, said, list(range(len(ids)))) for ids, said in talks]
            batch = collate(examples, encoder.special[PAD], 0)
            hits = (logits_of(net, net.size, batch).argmax(-1) == batch.targets).tolist()
            ok = True
            for hit, target in zip(hits, batch.targets.tolist(), strict=True):
                ok = ok and hit
                if target == encoder.special[END]:
                    right.append(ok)
                    ok = True
        out[name] = round(sum(right) / len(right), 3)
    return out


def rate_at(progress: float, step: int, warm: int = 100) -> float:
    """Return the learning rate's factor: linear warm-up, constant, linear to zero in the last 60 %."""
    return min(1.0, (step + 1) / warm) * min(1.0, max(0.0, (1 - progress) / 0.6))


class Training:
    """One training run: network, optimiser, and how far it is; all of it is in the checkpoint."""

    def __init__(self, args: argparse.Namespace, encoder: Encoder) -> None:
        self.args = args
        self.encoder = encoder
        self.size = Size(vocabulary=encoder.tokenizer.get_vocab_size())
        self.net = Network(self.size)
        initialise(self.net, args.seed)
        matrices = [p for p in self.net.layers.parameters() if p.ndim == 2]
        rest = [p for p in self.net.parameters() if all(p is not m for m in matrices)]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=args.rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.state: dict[str, Any] = {"step": 0, "pool": 0, "tokens": 0, "seconds": 0.0}
        self.path: Path = args.directory / "last.pt"
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            self.net.load_state_dict(saved["net"])
            self.optimiser.load_state_dict(saved["opts"][0])
            self.state = saved["state"]
        elif args.weights:
            self.net.load_state_dict(state_of(load_file(args.weights), self.size))
            self.state["tokens"] = int(args.millions * 1e6)
        self.run: Any = torch.compile(self.net, dynamic=True) if args.compile else self.net
        self.losses: list[float] = []

    def save(self) -> None:
        """Write the checkpoint; a crash in the middle leaves the one before."""
        part = self.path.with_suffix(".part")
        saved = {
            "net": self.net.state_dict(),
            "opts": [self.optimiser.state_dict()],
            "state": self.state,
            "size": asdict(self.size),
        }
        torch.save(saved, part)
        part.replace(self.path)

    def learn(self, batch: Batch, factor: float) -> None:
        """Take one step."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.args.rate * factor
        logits = logits_of(self.run, self.size, batch)
        each = F.cross_entropy(logits, batch.targets, reduction="none")
        loss: Any = (each * batch.weights).sum() / batch.weights.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.losses.append(float(each.detach()[batch.weights == 1].mean()))
        self.state["step"] += 1
        self.state["tokens"] += batch.tokens

    def report(self, factor: float) -> None:
        """Print one line: progress, mean loss on answers since the last line, the probes."""
        row = {
            **self.state,
            "seconds": round(self.state["seconds"]),
            "loss": round(sum(self.losses) / len(self.losses), 4),
            "rate": round(factor, 3),
            **probe(self.net, self.encoder),
        }
        self.losses = []
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()

    def go(self) -> None:
        """Train until the time is used up, over all runs together."""
        state, limit_s = self.state, self.args.minutes * 60
        began, saved_at = time.monotonic() - state["seconds"], time.monotonic()
        told = state["tokens"] // PROBE_EVERY_TOKENS
        while state["seconds"] < limit_s:
            other = OTHER if state["tokens"] < 8e6 else 0.0
            millions = state["tokens"] / 1e6
            for batch in batches(self.encoder, self.args.seed, state["pool"], millions, other):
                factor = rate_at(state["seconds"] / limit_s, state["step"])
                self.learn(batch, factor)
                state["seconds"] = time.monotonic() - began
                if state["tokens"] // PROBE_EVERY_TOKENS > told:
                    told = state["tokens"] // PROBE_EVERY_TOKENS
                    self.report(factor)
            state["pool"] += 1
            if time.monotonic() - saved_at > SAVE_EVERY_S:
                saved_at = time.monotonic()
                self.save()
        self.save()


def main() -> None:
    """Train until --minutes of training have passed, over all runs together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=111)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--weights", type=Path, help="begin with these (model.safetensors)")
    parser.add_argument("--millions", type=float, default=0, help="tokens the weights have seen")
    parser.add_argument("--directory", type=Path, default=DIRECTORY / ".checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.directory.mkdir(parents=True, exist_ok=True)
    vocabulary = DIRECTORY / "tokenizer.json"
    if not vocabulary.exists():
        build().save(str(vocabulary))
    training = Training(args, Encoder.load())
    about = {"parameters": parameters_of(training.net), **asdict(training.size), **training.state}
    sys.stdout.write(json.dumps(about) + "\n")
    training.go()


if __name__ == "__main__":
    main()
