"""G1Q: passages in the prompt of a decoder-only model: their place, their shift, and what replacing them costs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch

from bench.document import BenchOptions, Body
from bench.engine.slot_reader import SlotReader
from bench.engine.slot_replacement import HOWS, How, ReplacedAnswer, SlotAnswers
from bench.mesh.interval_mesh import spoken
from bench.rounds import order
from bench.suites.engine_pairs import told
from bench.workloads import instruct_model
from bench.workloads.reports import CHUNK, PASSAGE, RETRIEVALS, K, Report, Reports, Retrieval
from bench.workloads.slot_prompts import Place, SlotPrompts
from common.pages.identity import PAGE
from engine.decoder.executor.torch_executor import TorchExecutor
from loadgen import stats
from models.retro.evaluate import mean95, perplexity

PLACES: tuple[Place, ...] = ("before", "after")
INTERVAL, WRITTEN = (
    64,
    32,
)  # tokens between retrievals of texts that are read, and of answers that are written
BYTES = 192 << 20  # of pages
SAME = "a replaced prompt gives the tokens of one that is read anew"
LEAST = "a replacement computes what comes after its first new token, and the rest of that page"
OFTEN, PLACED, SHIFTED = (
    "passages found as the text goes on tell more than those found once",
    "passages before the question tell no less than after it",
    "shifted passages of a stale query tell no less than as found",
)


class _Read(NamedTuple):
    """What a model made of a report: its mean loss in nats, and which facts' values it would have written itself."""

    loss: float
    right: list[bool]


class _Away(NamedTuple):
    """What precomputed passages change: mean KL in nats a token, and the share of tokens where another is likeliest."""

    divergence: float
    other: float


class _Reading(NamedTuple):
    """A model that reads the reports."""

    name: str
    prompts: SlotPrompts
    reader: SlotReader
    reports: Reports


def run(options: BenchOptions) -> Body:
    """Let models read reports with passages at each place, then write answers whose passages are replaced."""
    body = Body()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="spillway-g1q-") as folder:
        executor = _loaded("spillway-demo", "fp32")
        shipped = _reading("S", executor, Path(folder), options)
        _read_by(shipped, body)
        instruct = instruct_model.readable(Path(folder))
        if instruct is not None:
            other = _loaded(str(instruct), "auto")
            _read_by(_reading(other.name, other, Path(folder), options), body)
        _costs(shipped, executor, options, body)
    if instruct is None:
        body.notes.append(f"No model but S read: {instruct_model.HINT}.")
    return body


def _loaded(model: str, kind: str) -> TorchExecutor:
    return TorchExecutor.load(model, device="cpu", dtype=kind, threads=1, kv_bytes=BYTES)


def _reading(name: str, executor: TorchExecutor, folder: Path, options: BenchOptions) -> _Reading:
    """Return the reports as a model reads them: fewer and shorter ones where it is not the shipped one."""
    prompts, small = SlotPrompts(executor, folder), name != "S"
    texts = options.rounds(3 if small else 6, 1)
    stored = options.pick(40 if small else 100, 4)
    tokens = options.pick(192 if small else 384, 128)
    reports = Reports(prompts.tokenizer, texts, stored, tokens, options.seed)
    return _Reading(name, prompts, SlotReader(executor), reports)


# -- reading ---------------------------------------------------------------------------------------------

READ = ["passages", "place", "perplexity", "by that of none [95 %]", "facts told"]
AWAY = [
    "place", "KL, nats a token", "another token likeliest", "perplexity by the exact one's [95 %]",
    "facts told", "exact",
]  # fmt: skip


def _read_by(reading: _Reading, body: Body) -> None:
    """Read all reports with every kind of retrieval and place, and with passages computed beforehand."""
    count = len(reading.reports.reports)
    found = {
        (how, place): [_read(reading, number, how, place) for number in range(count)]
        for how in RETRIEVALS
        for place in (PLACES[:1] if how == "none" else PLACES)
    }
    alone, rows = found["none", "before"], list[list[str]]()
    for (how, place), each in found.items():
        name = how if how in {"none", "once"} else f"{how}, every {INTERVAL}"
        ratio = "-" if how == "none" else told(_by(each, alone))
        rows.append([
            name, "-" if how == "none" else place, f"{_perplexity(each):.3f}", ratio, _facts(each),
        ])  # fmt: skip
        body.samples[f"{reading.name}/{how}/{place}"] = [read._asdict() for read in each]
    body.table(
        f"What {reading.name} makes of reports whose facts stand in the passages", READ, rows
    )
    _judge(reading.name, found, body)
    _precomputed(reading, found, body)
    reports = reading.reports
    body.notes.append(
        f"{reading.name} read {count} reports of {len(reports.reports[0].tokens)} tokens about entities it never saw; "
        f"their facts stand, in other words, in {reports.chunks:,} chunks of {CHUNK} tokens; MiniLM's vectors, exact "
        f"search, {K} passages of {PASSAGE} tokens. Perplexity is of the true text after its first chunk; a fact is "
        "told where each token of its value is the likeliest behind the true text before it."
    )


def _read(reading: _Reading, number: int, how: Retrieval, place: Place) -> _Read:
    """Read a report, with the passages in the prompt that were retrieved last."""
    report, parts = reading.reports.reports[number], list[torch.Tensor]()
    points = reading.reports.points(number, INTERVAL)
    for point, passages in zip(
        points, reading.reports.passages(number, INTERVAL, how), strict=True
    ):
        prompt = reading.prompts.made(report.question, passages, place)
        text = report.tokens[: point + INTERVAL]
        parts.append(reading.reader.predicted(prompt.tokens, text, point))
    return _told(report, torch.cat(parts))


def _told(report: Report, predicted: torch.Tensor) -> _Read:
    """Return what log probabilities of a report's tokens after its first chunk say."""
    true = torch.tensor(report.tokens[CHUNK:])
    loss = -predicted.gather(1, true[:, None]).mean()
    hits = (predicted.argmax(1) == true).tolist()
    right = [all(hits[begin - CHUNK : end - CHUNK]) for begin, end in report.values]
    return _Read(float(loss), right)


def _judge(name: str, found: dict[tuple[Retrieval, Place], list[_Read]], body: Body) -> None:
    """Judge what the API does unless told otherwise: passages before the question, found anew, and shifted."""
    default = found["pipelined", "before"]
    often = _by(default, found["once", "before"])
    body.met[f"{name}: {OFTEN}"] = "goal" if often["high"] < 1 else "missed"
    for what, other in (
        (PLACED, found["pipelined", "after"]), (SHIFTED, found["pipelined, not shifted", "before"]),
    ):  # fmt: skip
        body.met[f"{name}: {what}"] = "goal" if _by(default, other)["low"] <= 1 else "missed"


def _precomputed(
    reading: _Reading, found: dict[tuple[Retrieval, Place], list[_Read]], body: Body
) -> None:
    """Compare passages that are computed alone beforehand with exact ones."""
    rows = []
    for place in PLACES:
        away, reads = list[_Away](), list[_Read]()
        for number, report in enumerate(reading.reports.reports):
            parts = []
            points = reading.reports.points(number, INTERVAL)
            for point, passages in zip(
                points, reading.reports.passages(number, INTERVAL, "pipelined"), strict=True
            ):
                prompt = reading.prompts.made(report.question, passages, place)
                text = report.tokens[: point + INTERVAL]
                exact = reading.reader.predicted(prompt.tokens, text, point)
                parts.append(reading.reader.approximated(prompt, text, point))
                divergence = (exact.exp() * (exact - parts[-1])).sum(1).mean()
                other = (exact.argmax(1) != parts[-1].argmax(1)).float().mean()
                away.append(_Away(float(divergence), float(other)))
            reads.append(_told(report, torch.cat(parts)))
        exactly = found["pipelined", place]
        rows.append([
            place, f"{fmean(each.divergence for each in away):.4f}",
            f"{fmean(each.other for each in away):.1%}", told(_by(reads, exactly)), _facts(reads), _facts(exactly),
        ])  # fmt: skip
        body.samples[f"{reading.name}/precomputed/{place}"] = [read._asdict() for read in reads]
    body.table(
        f"Passages computed alone (`retrieval.precomputed`), put into the prompt of {reading.name}, "
        "beside the exact prompt",
        AWAY,
        rows,
    )


def _by(reads: Sequence[_Read], others: Sequence[_Read]) -> dict[str, float]:
    """Return the perplexity by another one, text by text, with its interval."""
    gaps = [ours.loss - theirs.loss for ours, theirs in zip(reads, others, strict=True)]
    low, high = map(math.exp, mean95(gaps))
    return {"value": math.exp(fmean(gaps)), "low": low, "high": high}


def _perplexity(reads: Sequence[_Read]) -> float:
    return perplexity([read.loss for read in reads])


def _facts(reads: Sequence[_Read]) -> str:
    right = [each for read in reads for each in read.right]
    return f"{sum(right)} of {len(right)}"


# -- writing ---------------------------------------------------------------------------------------------

COSTS = [
    "model", "place", "prompt", "tokens of prompt and answer", "computed a replacement", "of these before the slot",
    "ms a replacement", "first token, ms", "s an answer", "answer / replaced [95 %]",
]  # fmt: skip


def _costs(reading: _Reading, executor: TorchExecutor, options: BenchOptions, body: Body) -> None:
    """Write answers of S, and of M's shape with random weights, whose passages are replaced in every way."""
    chunks, rows, same, fewest = options.pick(5, 2), list[list[str]](), list[bool](), list[bool]()
    for name, rounds in (("S", 6), ("M", 2)) if not options.quick else (("S", 1),):
        if name == "M":
            folder = options.setup_dir / "models" / "llama-85m-chat"
            executor = _loaded(spoken("llama-85m", folder), "bf16")
        answers = SlotAnswers(executor)
        for place in PLACES:
            prompts = [
                _prompts(reading, number, place, chunks)
                for number in range(min(2, len(reading.reports.reports)))
            ]
            found = _written(answers, prompts, options.rounds(rounds, 1))
            replaced = found["replaced"]
            for how, each in found.items():
                same += [a.tokens == b.tokens for a, b in zip(each, replaced, strict=True)]
                rows.append(_cost(name, place, how, prompts, found))
            fewest += [
                answer.computed == least_computed(prompts[number % len(prompts)], answer.tokens)
                for number, answer in enumerate(replaced)
            ]
            body.samples[f"{name}/{place}"] = {
                how: [answer._asdict() for answer in each] for how, each in found.items()
            }
    body.table(
        f"Answers of {chunks} chunks of {WRITTEN} tokens whose passages are replaced", COSTS, rows
    )
    body.met[SAME] = "goal" if all(same) else "missed"
    body.met[LEAST] = "goal" if all(fewest) else "missed"
    body.notes.append(
        "Passages are there at once: no search is part of these times. *Read anew* is a new sequence with prompt and "
        "answer, which finds pages of an equal prefix, or none, as on another worker."
    )


def _written(
    answers: SlotAnswers, prompts: Sequence[Sequence[Sequence[int]]], rounds: int
) -> dict[How, list[ReplacedAnswer]]:
    """Write so many answers in each way, in turn."""
    found: dict[How, list[ReplacedAnswer]] = {how: [] for how in HOWS}
    answers.write(prompts[0][:2], WRITTEN, "replaced")  # what a process does first takes longer
    for number in range(rounds):
        for how in order(list(HOWS), number):
            found[how].append(answers.write(prompts[number % len(prompts)], WRITTEN, how))
    return found


def _prompts(reading: _Reading, number: int, place: Place, chunks: int) -> list[list[int]]:
    """Return the prompts of an answer, with the passages of a report's intervals in turn."""
    question = reading.reports.reports[number].question
    passages = reading.reports.passages(number, WRITTEN, "sequential")[:chunks]
    return [reading.prompts.made(question, each, place).tokens for each in passages]


def _alike(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(some), len(others)))


def _kept(prompts: Sequence[Sequence[int]], number: int, answer: Sequence[int]) -> tuple[int, int]:
    """Return how many tokens a replaced prompt, with the answer, begins with that were computed; and in full pages."""
    whole = [*prompts[number], *answer[: number * WRITTEN]]
    same = 0
    for earlier, prompt in enumerate(prompts[:number], 1):
        computed = [*prompt, *answer[: earlier * WRITTEN - 1]]  # the last token has no row by then
        same = max(same, _alike(computed, whole))
    same = min(same, len(whole) - 1)
    return same, same // PAGE * PAGE


def least_computed(prompts: Sequence[Sequence[int]], answer: Sequence[int]) -> list[int]:
    """Return how many tokens each replacement has to compute where full pages before its first new token stay."""
    return [
        len(prompts[number]) + number * WRITTEN - _kept(prompts, number, answer)[1]
        for number in range(1, len(prompts))
    ]


def _cost(
    name: str,
    place: Place,
    how: How,
    prompts: Sequence[Sequence[Sequence[int]]],
    found: dict[How, list[ReplacedAnswer]],
) -> list[str]:
    each, replaced = found[how], found["replaced"]
    wholes, before = list[int](), list[int]()
    for number, answer in enumerate(each):
        asked = prompts[number % len(prompts)]
        for at in range(1, len(asked)):
            same, kept = _kept(asked, at, answer.tokens)
            wholes.append(len(asked[at]) + at * WRITTEN)
            before.append(same - (0 if how == "read anew" else kept))
    ratio = "-"
    if how != "replaced":
        pairs = stats.paired_ratio([a.seconds for a in each], [a.seconds for a in replaced])
        ratio = told(pairs)
    return [
        name, place, how, f"{fmean(wholes):.0f}", f"{fmean(n for a in each for n in a.computed):.0f}",
        f"{fmean(before):.0f}", f"{1000 * median(s for a in each for s in a.replaced_s):.1f}",
        f"{1000 * median(a.first_s for a in each):.1f}", f"{median(a.seconds for a in each):.3f}",
        ratio,
    ]  # fmt: skip
