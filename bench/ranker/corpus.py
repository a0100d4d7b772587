"""What the cross-encoder is trained and judged on: windows, questions, and the wrong passages that the encoder finds.

The questions' lists depend on the seed, the installed packages and the default encoder alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.ranker.lists import RankedList, held_out, wrong
from bench.ranker.pages import TextPage, begins, pages, windows
from bench.ranker.questions import asked
from cli import sample
from cli.files import Item

NEAREST = 32
LISTS, JUDGED = 6000, 250
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages, lists to train on, and questions to judge by with all that the encoder found for each, best first."""

    passages: list[str]
    training: list[RankedList]
    judged: list[tuple[str, int, list[int]]]

    def save(self, path: Path) -> None:
        """Write the corpus as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read a corpus that `save` wrote."""
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        training = [RankedList(question, tuple(at)) for question, at in told["training"]]
        judged = [(question, right, found) for question, right, found in told["judged"]]
        return cls(told["passages"], training, judged)


def made(seed: int) -> Corpus:
    """Return the corpus of the installed packages, with LISTS lists to train on if there are so many questions."""
    given = pages(_known())
    parts = [window for number, page in enumerate(given) for window in windows(number, page)]
    drawn = [
        asked(given[w.page], w.text, random.Random(f"{seed} {n}")) for n, w in enumerate(parts)
    ]
    page_of = [window.page for window in parts]
    numbers = [n for n, question in enumerate(drawn) if question is not None]
    random.Random(seed).shuffle(numbers)
    held = [n for n in numbers if held_out(page_of[n], seed)][:JUDGED]
    kept = [n for n in numbers if not held_out(page_of[n], seed)][:LISTS]
    texts = [window.text for window in parts]
    questions = [drawn[n] for n in (*held, *kept)]
    rows = _nearest([q.text for q in questions if q is not None], texts)
    alike = [_sense(given[page], text) for page, text in zip(page_of, texts, strict=True)]
    judged, training = [], []
    for n, question, found in zip((*held, *kept), questions, rows, strict=True):
        assert question is not None
        if n in set(held):
            judged.append((question.text, n, found))
            continue
        # A held-out page teaches nothing, not even as a wrong passage.
        allowed = [at for at in found if not held_out(page_of[at], seed)]
        others = wrong(allowed, page_of, n, alike, random.Random(f"wrong {seed} {n}"))
        training.append(RankedList(question.text, (n, *others)))
    return Corpus(texts, training, judged)


def _known() -> set[str]:
    """Return the beginnings of the documents of `docs`, none of which may be trained on."""
    found = set()
    for item in sample.documents():
        if isinstance(item, Item):
            title, _, rest = item.text.partition("\n\n")
            found |= {begins(item.text), begins(rest if item.id.endswith(title) else item.text)}
    return found


def _sense(page: TextPage, text: str) -> str:
    """Return what must differ for two passages to answer different questions: the text without the page's name."""
    return begins(text.removeprefix(page.name))


def _nearest(questions: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
    """Return for each question the NEAREST texts by the default encoder, nearest first."""
    from engine.models.encoders.encoder import Encoder  # noqa: PLC0415 - heavy, and only here

    encoder = Encoder.load(device="cpu", threads=1)
    tokenizer = Tokenizer.from_str(encoder.tokenizer_json().decode())
    tokenizer.enable_truncation(encoder.max_tokens)

    def vectors(given: Sequence[str]) -> npt.NDArray[np.float32]:
        # Texts of like length together, so that few are padded.
        order = sorted(range(len(given)), key=lambda at: len(given[at]))
        out = np.zeros((len(given), encoder.dimension), np.float32)
        for first in range(0, len(order), _BATCH):
            some = order[first : first + _BATCH]
            encoded = tokenizer.encode_batch([given[at] for at in some])
            out[some] = encoder.encode([each.ids for each in encoded])
        return out

    against, rows = vectors(texts), []
    for row in vectors(questions):
        scores = against @ row
        best = np.argpartition(-scores, NEAREST)[:NEAREST]
        rows.append([int(at) for at in best[np.argsort(-scores[best], kind="stable")]])
    return rows
