"""Quality of a search by vectors, by words and by both on real questions, asked of a running instance.

`python -m bench.workloads.retrieval --url URL SET DIRECTORY`, where SET is

- `cranfield`: 225 questions of researchers, judged, to 1,400 abstracts: `cran.all.1400`, `cran.qry`, `cranqrel`;
- `perl`: the questions of perlfaq, each without its heading, among all of perl's pages (Debian's perl-doc, its `pod`);
- `python`: those of Python's FAQ among its documentation (Debian's python3-doc, its `html/_sources`).

Prints nDCG, the reciprocal rank and recall, at 10, of each mode, and how much the others differ from vectors.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from spillway_client import AsyncSpillway, SearchMode

MODES: tuple[SearchMode, ...] = ("vector", "text", "hybrid")
K = 10
WORDS, STEP = 130, 110  # of a passage, and from one to the next
_AT_ONCE = 64
_DRAWS = 2000


class Question(NamedTuple):
    """A question and the passages, by number, that answer it."""

    text: str
    answers: frozenset[int]


class QuestionSet(NamedTuple):
    """Passages, and questions that some of them answer."""

    passages: list[str]
    questions: list[Question]


def passages_of(text: str) -> list[str]:
    """Return a text in pieces of WORDS words that overlap."""
    words = text.split()
    return [
        " ".join(words[at : at + WORDS])
        for at in range(0, max(1, len(words) - (WORDS - STEP)), STEP)
        if words
    ]


def cranfield(directory: Path) -> QuestionSet:
    """Read the Cranfield collection: what was judged 1 to 4 answers."""
    number = re.compile(r"^\.I \d+\s*\n", re.MULTILINE)
    field = re.compile(r"^\.([TABW])\n(.*?)(?=^\.[TABW]\n|\Z)", re.MULTILINE | re.DOTALL)
    abstracts = []
    for part in number.split((directory / "cran.all.1400").read_text(errors="replace"))[1:]:
        fields = {match[1]: match[2] for match in field.finditer(part)}
        abstracts.append(" ".join(f"{fields.get('T', '')} {fields.get('W', '')}".split()))
    asked = number.split((directory / "cran.qry").read_text())[1:]
    answers: dict[int, set[int]] = {}
    for line in (directory / "cranqrel").read_text().splitlines():
        question, passage, grade = map(int, line.split()[:3])
        if 1 <= grade <= 4:
            answers.setdefault(question - 1, set()).add(passage - 1)
    questions = [
        Question(" ".join(asked[at].split(".W\n", 1)[1].split()), frozenset(found))
        for at, found in sorted(answers.items())
    ]
    return QuestionSet(abstracts, questions)


def perl(directory: Path) -> QuestionSet:
    """Read perlfaq1 to perlfaq9 and the other pages; not perltoc, which holds all headings."""
    heading = re.compile(r"^=head2 (.+\?.*)\n", re.MULTILINE)

    def pages() -> Iterator[str]:
        for page in sorted(directory.glob("*.pod")):
            other = page.name.startswith("perlfaq") or page.name == "perltoc.pod"
            if not other and "delta" not in page.name:
                yield _plain_pod(page.read_text(errors="replace"))

    answered: list[tuple[str, str]] = []
    for page in sorted(directory.glob("perlfaq[1-9].pod")):
        parts = heading.split(page.read_text(errors="replace"))
        for text, answer in zip(parts[1::2], parts[2::2], strict=True):
            body = re.split(r"^=head1", answer, maxsplit=1, flags=re.MULTILINE)[0]
            answered.append((_plain_pod(text), _plain_pod(body)))
    return _asked(answered, pages())


def python(directory: Path) -> QuestionSet:
    """Read Python's FAQ and the rest of its documentation, news aside."""
    heading = re.compile(r"^(.+\?)\n[-=~^.]{5,}\n", re.MULTILINE)
    answered: list[tuple[str, str]] = []
    for page in sorted((directory / "faq").glob("*.txt")):
        parts = heading.split(page.read_text())
        for text, answer in zip(parts[1::2], parts[2::2], strict=True):
            body = re.sub(r"^\S.*\n={5,}\n", "", answer, flags=re.MULTILINE)
            answered.append((re.sub(r"[`*]|:\w+:", "", text), body))
    others = (
        page.read_text()
        for page in sorted(directory.rglob("*.txt"))
        if page.parent.name not in ("faq", "whatsnew")
    )
    return _asked(answered, others)


def _plain_pod(text: str) -> str:
    text = re.sub(r"^=\w+ ?", "", text, flags=re.MULTILINE)
    return re.sub(r"[BCIFLSEX]<+ ?(.*?) ?>+", r"\1", text).strip()


def _asked(answered: Sequence[tuple[str, str]], others: Iterator[str]) -> QuestionSet:
    passages: list[str] = []
    questions: list[Question] = []
    for text, answer in answered:
        pieces = passages_of(answer)
        if pieces:
            answers = frozenset(range(len(passages), len(passages) + len(pieces)))
            questions.append(Question(" ".join(text.split()), answers))
            passages += pieces
    for page in others:
        passages += passages_of(page)
    return QuestionSet(passages, questions)


SETS: dict[str, Callable[[Path], QuestionSet]] = {
    "cranfield": cranfield,
    "perl": perl,
    "python": python,
}


class Judged(NamedTuple):
    """How good the first K hits of one question are."""

    ndcg: float
    reciprocal: float
    recall: float


def judge(found: Sequence[int], answers: frozenset[int]) -> Judged:
    """Judge an order of passages; all answers count alike."""
    ranks = [rank for rank, passage in enumerate(found[:K], 1) if passage in answers]
    most = min(K, len(answers))
    ideal = sum(1 / math.log2(rank + 1) for rank in range(1, most + 1))
    gained = sum(1 / math.log2(rank + 1) for rank in ranks)
    return Judged(gained / ideal, 1 / ranks[0] if ranks else 0.0, len(ranks) / most)


def difference(these: Sequence[float], those: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean difference of pairs, and the bounds of 95 % of its bootstraps."""
    rng = random.Random(1)
    pairs = [one - other for one, other in zip(these, those, strict=True)]
    draws = sorted(fmean(rng.choices(pairs, k=len(pairs))) for _ in range(_DRAWS))
    return fmean(pairs), draws[_DRAWS // 40], draws[-_DRAWS // 40]


async def measure(url: str, given: QuestionSet, name: str) -> dict[SearchMode, list[Judged]]:
    """Store the passages in a collection of their own, ask every question in every mode, and remove them."""
    async with AsyncSpillway(url) as client:
        await client.collections.create(name)
        try:
            for at in range(0, len(given.passages), _AT_ONCE):
                part = enumerate(given.passages[at : at + _AT_ONCE], at)
                await client.documents(name).add(
                    [{"id": str(number), "text": text} for number, text in part if text]
                )
            found: dict[SearchMode, list[Judged]] = {mode: [] for mode in MODES}
            for question in given.questions:
                for mode in MODES:
                    # A passage may be stored as several chunks: the first one found counts.
                    hits = (await client.search(name, question.text, k=3 * K, mode=mode)).data
                    order = list(dict.fromkeys(int(hit.id) for hit in hits))
                    found[mode].append(judge(order, question.answers))
            return found
        finally:
            await client.collections.delete(name)


def table(found: dict[SearchMode, list[Judged]]) -> str:
    """Return a line for each mode."""
    lines = []
    plain = [one.ndcg for one in found["vector"]]
    for mode, rows in found.items():
        means = (fmean(row[at] for row in rows) for at in range(3))
        mean, low, high = difference([row.ndcg for row in rows], plain)
        shown = "  ".join(
            f"{what} {mean:.3f}" for what, mean in zip(Judged._fields, means, strict=True)
        )
        lines.append(f"{mode:8}{shown}  ndcg less vector's {mean:+.3f} [{low:+.3f}, {high:+.3f}]")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--others", type=int, help="passages beside the answers, drawn; all")
    args = parser.parse_args(argv)
    given = SETS[args.set](args.directory)
    if args.others is not None:
        own = 1 + max(max(question.answers) for question in given.questions)
        rest = given.passages[own:]
        random.Random(1).shuffle(rest)
        given = QuestionSet(given.passages[:own] + rest[: args.others], given.questions)
    print(f"{args.set}: {len(given.questions)} questions, {len(given.passages)} passages")
    print(table(asyncio.run(measure(args.url, given, f"retrieval-{args.set}"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
