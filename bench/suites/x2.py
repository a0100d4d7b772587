"""X2: what smaller weights cost the shipped model: logits, perplexity, exact answers, and KL beside llama.cpp's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from bench.document import BenchOptions, Body, Rival
from bench.rivals import llama_server
from bench.rivals.engine_process import LLAMA
from bench.rivals.gguf_file import KINDS as FORMATS
from bench.rivals.gguf_file import TYPES, format_of
from bench.suites.engine_pairs import told
from bench.workloads import divergence
from common.pages.identity import PAGE
from common.types.generation import SamplingParams
from engine.decoder.executor.interface import SampledToken, SamplingRequest, SequenceInput
from engine.decoder.executor.torch_executor import TorchExecutor
from models.demo.evaluate import Model as Oracle
from models.demo.evaluate import measure
from models.demo.tokens import DIRECTORY
from models.demo.world.conversations import Message
from models.demo.world.tasks import Task, suite

KINDS = ("fp32", "bf16", "int8", "int4")
SET, NEW, STEP, TOGETHER, LONGEST = "present", 48, 512, 16, 1024
_GREEDY = SamplingParams(temperature=0.0)


class Ours(Oracle):
    """The same questions to our engine, greedily."""

    def __init__(self, kind: str) -> None:
        super().__init__(str(DIRECTORY))
        self.runner = TorchExecutor.load(str(DIRECTORY), device="cpu", dtype=kind, kv_bytes=1 << 30)

    def tokens(self, messages: list[Message]) -> list[int]:
        """Return a conversation as the model reads it."""
        ids: list[int] = self.tokenizer(self._prompt(messages), add_special_tokens=False)[
            "input_ids"
        ]
        return ids

    def answer(
        self, prompts: list[list[Message]], batch_tokens: int = TOGETHER * LONGEST
    ) -> list[str]:
        """Return the answer to each prompt; so many together as make `batch_tokens` at the most."""
        texts = [self.tokens(prompt) for prompt in prompts]
        size = max(1, batch_tokens // max(map(len, texts)))
        said: list[str] = []
        for at in range(0, len(texts), size):
            said += map(self._text, self._generate(texts[at : at + size]))
        return said

    def teach(self, task: Task) -> tuple[torch.Tensor, list[int]]:
        """Return the logits (answer tokens, vocabulary) before each token of the expected answer, and these."""
        prompt = self.tokens(task.prompt)
        answer: list[int] = self.tokenizer(task.expected, add_special_tokens=False)["input_ids"]
        text = [*prompt, *answer]
        table = [list(range(len(text) // PAGE + 1))]
        logits = self.runner.logits([SequenceInput(text[:-1], list(range(len(text) - 1)), table)])
        return logits[len(prompt) - 1 :], answer

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text.strip()

    def _generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        room = (max(map(len, prompts)) + NEW) // PAGE + 1
        tables = [[list(range(n * room, (n + 1) * room))] for n in range(len(prompts))]
        out: list[list[int]] = [[] for _ in prompts]
        for n, prompt in enumerate(prompts):
            for at in range(0, len(prompt), STEP):
                some, last = list(prompt[at : at + STEP]), at + STEP >= len(prompt)
                draw = _draw(len(prompt)) if last else None
                rows = SequenceInput(some, list(range(at, at + len(some))), tables[n], draw)
                self._take(self.runner.execute([rows]), [n], out)
        stops = set(self.runner.stop_ids)
        while open_ := [n for n, o in enumerate(out) if o[-1] not in stops and len(o) < NEW]:
            batch = []
            for n in open_:
                at = len(prompts[n]) + len(out[n]) - 1
                batch.append(SequenceInput([out[n][-1]], [at], tables[n], _draw(at + 1)))
            self._take(self.runner.execute(batch), open_, out)
        return out

    @staticmethod
    def _take(
        drawn: Sequence[SampledToken | None], of: Sequence[int], out: list[list[int]]
    ) -> None:
        for n, each in zip(of, drawn, strict=True):
            if each is not None:
                out[n].append(each.token)


def _draw(position: int) -> SamplingRequest:
    return SamplingRequest(_GREEDY, 0, position, [], [])


def run(options: BenchOptions) -> Body:
    """Measure every kind of weights on the same questions (quick: few of them)."""
    body, rows = Body(), []
    count = options.rounds(500, 20)
    plain: list[torch.Tensor] = []
    for kind in KINDS:
        model = Ours(kind)
        ((_, tasks),) = [each for each in suite(count, model.length) if each[0] == SET]
        loss, tokens, off, same = 0.0, 0, [], 0
        for number, task in enumerate(tasks):
            logits, answer = model.teach(task)
            if kind == KINDS[0]:
                plain.append(logits)
            exact = plain[number]
            chances = torch.log_softmax(logits.double(), -1)
            loss -= float(chances[range(len(answer)), answer].sum())
            tokens += len(answer)
            off.append(float((logits - exact).abs().amax() / exact.abs().amax()))
            same += int((logits.argmax(-1) == exact.argmax(-1)).sum())
        found: dict[str, Any] = measure(model, tasks)
        rows.append(
            [
                kind, f"{max(off):.1e}", f"{same / tokens:.2%}", f"{math.exp(loss / tokens):.4f}",
                f"{found['exact']:.1%}", f"{found['whole']:.1%}",
            ]
        )  # fmt: skip
        body.samples[kind] = {"relative": off, "exact": found["exact"]}
    columns = ["weights", "logits off, worst", "same likeliest token", "perplexity of the answers"]
    columns += ["exact", "right to the letter"]
    body.table(f"The shipped model, {count} questions of its set '{SET}'", columns, rows)
    least = body.samples[KINDS[0]]["exact"]
    body.met["int8 answers as exactly"] = (
        "met" if body.samples["int8"]["exact"] >= least - 0.01 else "missed"
    )
    body.notes.append(
        "Logits: the largest difference to fp32 over the largest logit, along the expected answers; the likeliest "
        "token likewise. int8 and int4 round weights in groups of 32 inputs, int4 to 16 values that a scale and a "
        "shift fit to them by least squares; activations to 8 bits."
    )
    _beside(body, options)
    return body


def _beside(body: Body, options: BenchOptions) -> None:
    """Add what each kind costs on held-out text beside llama.cpp's format of as many bits."""
    texts = divergence.held_out(options.pick(divergence.TEXTS, 8))
    kinds = [*FORMATS, "int4/Q4_K", *TYPES]
    measured = asyncio.run(divergence.measure(texts, kinds, options))
    rows = []
    for kind, found in measured.items():
        there, here = bool(found.theirs), kind.partition("/")[0]
        form = format_of(kind.partition("/")[2] or kind)
        same = kind in TYPES
        if there and kind != "bf16" and not same:
            body.met[f"KL of {here} beside {form}"] = "met" if found.no_worse else "missed"
        ours, _, theirs = found.told().partition(" / ")
        weights = f"the same file, {kind}" if same else f"{here} / {form}"
        rows.append([weights, ours, theirs, told(found.ratio()) if there else "-"])
    columns = ["weights", "ours", "llama.cpp", "llama.cpp's / ours, text by text [95 %]"]
    body.table(f"Mean KL divergence of the next token, {len(texts)} held-out texts", columns, rows)
    body.samples["divergence"] = msgspec.to_builtins(measured)
    setting = {"texts": len(texts)}
    there = any(found.theirs for found in measured.values())
    body.rivals.append(
        Rival(LLAMA, f"{llama_server.VERSION}, its library", [setting], setting, there)
    )
    body.notes.append(
        "KL: in nats, of the distribution after every token of held-out questions, their passages and answers; the "
        "reference are the weights in bf16, computed in fp32, and all formats round these. A format is no worse if "
        "the interval of the ratio does not lie below 1."
    )
