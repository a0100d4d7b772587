"""The training of the cross-encoder: the default encoder's layers under a head of one score, by listwise softmax.

One step reads a few lists of a question with the passage that answers it and seven wrong ones; the loss is the
cross-entropy of the right one among the eight (Cao et al., ICML 2007, top-one ListNet with one relevant passage).
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertForSequenceClassification

from bench.ranker.corpus import Corpus
from bench.ranker.lists import RankedList, place_of, recall, reciprocal, reordered
from engine.models.encoders.files import find

DEPTHS = (16, 32)
_FROZEN = (
    (0.25, 3),
    (1.0, 1),
)  # until this part of the training so many lower layers stay as they are


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The sizes of a training: lists in all and in a step, tokens of a pair, rates of layers and of the head.

    After so many seconds of training it is saved, after so many steps it tells how far it is.
    """

    lists: int = 3200
    batch: int = 4
    tokens: int = 160
    rate: float = 1e-4
    head_rate: float = 1e-3
    seed: int = 20260101
    save_every_s: float = 90.0
    tell_every: int = 25

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.lists // self.batch


def factor_at(progress: float, warm: float = 0.06) -> float:
    """Return the learning rate's factor: linear warm-up, then linear to zero."""
    return min(progress / warm, (1 - progress) / (1 - warm)) if progress < 1 else 0.0


def frozen_at(progress: float) -> int:
    """Return how many of the lower layers are not trained yet."""
    return next((layers for until, layers in _FROZEN if progress < until), 0)


class Training:
    """One run: network, optimiser and how far it is, all of which a checkpoint holds."""

    def __init__(self, plan: TrainingPlan, corpus: Corpus, checkpoint: Path) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.corpus, self._checkpoint = plan, corpus, checkpoint
        source = find("").directory
        self._tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(plan.tokens)
        self._net = _network(source)
        head = [
            p
            for n, p in self._net.named_parameters()
            if n.startswith(("bert.pooler", "classifier"))
        ]
        body = [p for layer in self._net.bert.encoder.layer for p in layer.parameters()]
        self._optimiser = torch.optim.AdamW(
            [{"params": body, "full": plan.rate}, {"params": head, "full": plan.head_rate}],
            weight_decay=0.01,
        )
        self.step, self.seconds = 0, 0.0
        if self._checkpoint.exists():
            saved = torch.load(self._checkpoint, weights_only=True)
            self._net.load_state_dict(saved["net"])
            self._optimiser.load_state_dict(saved["optimiser"])
            self.step, self.seconds = saved["step"], saved["seconds"]

    def go(self) -> Iterator[dict[str, float]]:
        """Train to the end; yield now and then the step, the seconds so far, the loss and the share that is right."""
        self._net.train()
        order = list(range(len(self.corpus.training)))
        random.Random(self.plan.seed).shuffle(order)
        told, saved = list[tuple[float, float]](), self.seconds
        while self.step < self.plan.steps:
            began = time.monotonic()
            first = self.step * self.plan.batch
            some = [order[at % len(order)] for at in range(first, first + self.plan.batch)]
            told.append(self._learn([self.corpus.training[at] for at in some]))
            self.step += 1
            self.seconds += time.monotonic() - began
            if self.seconds - saved >= self.plan.save_every_s:
                saved = self.seconds
                self._save()
            if self.step % self.plan.tell_every == 0:
                loss, right = (sum(values) / len(told) for values in zip(*told, strict=True))
                told = []
                yield {"step": self.step, "seconds": self.seconds, "loss": loss, "right": right}
        self._save()

    def _learn(self, lists: Sequence[RankedList]) -> tuple[float, float]:
        """Take one step; return the loss, and the share of lists whose right passage came out first."""
        progress = self.step / self.plan.steps
        for group in self._optimiser.param_groups:
            group["lr"] = group["full"] * factor_at(progress)
        frozen = frozen_at(progress)
        for number, layer in enumerate(self._net.bert.encoder.layer):
            layer.requires_grad_(number >= frozen)
        pairs = [(one.question, self.corpus.passages[at]) for one in lists for at in one.passages]
        scores = torch.split(self._scores(pairs), [len(one.passages) for one in lists])
        target = torch.zeros(1, dtype=torch.long)
        loss: Any = torch.stack([F.cross_entropy(row[None], target) for row in scores]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self._net.parameters(), 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()
        right = sum(int(row.argmax()) == 0 for row in scores) / len(scores)
        return float(loss.detach()), right

    def _scores(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Return the raw score of each pair, computed in bfloat16, (pairs,)."""
        encoded = self._tokenizer.encode_batch(list(pairs))
        longest = max(len(each.ids) for each in encoded)
        ids, types, mask = (torch.zeros(len(encoded), longest, dtype=torch.long) for _ in range(3))
        for row, each in enumerate(encoded):
            ids[row, : len(each.ids)] = torch.tensor(each.ids)
            types[row, : len(each.ids)] = torch.tensor(each.type_ids)
            mask[row, : len(each.ids)] = 1
        with torch.autocast("cpu", torch.bfloat16):
            logits = self._net(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
        scores: Tensor = logits[:, 0].float()
        return scores

    @torch.no_grad()
    def judge(self) -> dict[str, dict[str, float]]:
        """Return recall and mean reciprocal rank on the held-out questions: of the search, and after reranking."""
        self._net.eval()
        places: dict[str, list[int | None]] = {"bi-encoder": []}
        places |= {f"cross-encoder, {depth} candidates": [] for depth in DEPTHS}
        for question, right, found in self.corpus.judged:
            places["bi-encoder"].append(place_of(right, found))
            scores = self._scores([(question, self.corpus.passages[at]) for at in found]).tolist()
            for depth in DEPTHS:
                ordered = reordered(found[:depth], scores[:depth])
                places[f"cross-encoder, {depth} candidates"].append(place_of(right, ordered))
        return {
            name: {
                "first 1": round(recall(at, 1), 4),
                "first 5": round(recall(at, 5), 4),
                "MRR": round(reciprocal(at), 4),
            }
            for name, at in places.items()
        }

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all weights by name."""
        return {name: tensor.clone() for name, tensor in self._net.state_dict().items()}

    def export(self, target: Path) -> None:
        """Write the model's directory as the mesh serves it."""
        source = find("").directory
        target.mkdir(parents=True, exist_ok=True)
        self._net.save_pretrained(target)
        shutil.copy(source / "tokenizer.json", target)

    def _save(self) -> None:
        """Write the checkpoint; a crash in the middle leaves the one before."""
        part = self._checkpoint.with_suffix(".part")
        state: dict[str, Any] = {
            "net": self._net.state_dict(),
            "optimiser": self._optimiser.state_dict(),
        }
        torch.save(state | {"step": self.step, "seconds": self.seconds}, part)
        part.replace(self._checkpoint)


def _network(source: Path) -> Any:
    """Return the encoder's layers under a pooler that begins as the identity and a head that begins near zero."""
    options: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    net: Any = BertForSequenceClassification.from_pretrained(source, num_labels=1, **options)
    with torch.no_grad():
        net.bert.pooler.dense.weight.copy_(torch.eye(net.config.hidden_size))
        net.bert.pooler.dense.bias.zero_()
    net.bert.embeddings.requires_grad_(requires_grad=False)
    return net


def figures(training: Training) -> str:
    """Return the run's plan, time and held-out figures as JSON text."""
    told = {
        "lists": training.plan.lists,
        "passages": len(training.corpus.passages),
        "held-out questions": len(training.corpus.judged),
        "minutes": round(training.seconds / 60, 1),
        "figures": training.judge(),
    }
    return json.dumps(told, indent=2)
