"""Answers of the shipped model that are bound to schemas: one engine, as a worker runs it, without a bus."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.pages.identity import root_id
from common.types.generation import OutputGrammar, SamplingParams
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sampling.grammar import GrammarCompiler
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue
from tests.support.schemas import SCHEMAS, Schema

DEMO = str(Path(__file__).resolve().parents[2] / "models/demo")
PROMPT = "<|begin|><|user|>Tell me about the river in JSON.<|end|><|assistant|>"
LIMITS = StepLimits(128, 32)


def schema(schema: Schema) -> OutputGrammar:
    """Return the grammar of a JSON Schema."""
    return OutputGrammar("json_schema", json.dumps(schema))


class SchemaRun:
    """Computes bound answers; `several` and `lookup` as in DecoderEngine, with so many bytes of pages."""

    def __init__(
        self,
        *,
        compiled: bool = True,
        lookup: bool = False,
        several: int = 1,
        kv_bytes: int = 32 << 20,
    ) -> None:
        self.executor = TorchExecutor.load(
            DEMO, device="cpu", dtype="fp32", threads=1, kv_bytes=kv_bytes, compiled=compiled
        )
        probes = measure(self.executor, LIMITS.tokens, LIMITS.running)
        context = self.executor.shape.context
        capacity = DecoderCapacity(probes, slo_s=60.0, context=context, fixed=True)
        self.device = DeviceQueue()
        self.engine = DecoderEngine(
            self.executor, capacity, LIMITS, self.device, lookup=lookup, several=several
        )
        text = self.executor.tokenizer_json()
        self.vocabulary = Vocabulary(text)
        self.prompt: list[int] = (
            Tokenizer.from_buffer(text).encode(PROMPT, add_special_tokens=False).ids
        )
        size, stop_ids = self.executor.shape.vocabulary, self.executor.stop_ids
        self.grammars = GrammarCompiler(self.vocabulary, size, stop_ids)
        self._order = 0

    def generation(
        self,
        name: str,
        grammar: OutputGrammar,
        *,
        seed: int,
        max_new: int = 400,
        n: int = 1,
        **how: Any,
    ) -> Generation:
        """Return a generation at temperature 1 that is not added yet."""
        stop_ids = self.executor.stop_ids
        request = GenerationRequest(
            name,
            [self.prompt],
            StopRules(max_new, ids=stop_ids),
            root_id(self.executor.fingerprint, ""),
            n=n,
            sampling=SamplingParams(seed=seed, **how),
            grammar=self.grammars.compile(grammar, stop_ids),
        )
        self._order += n
        return Generation(request, self.vocabulary, self._order)

    async def compute(self, generations: Sequence[Generation], *, ahead: bool = True) -> None:
        """Compute generations to their ends, with each step submitted while the one before runs if `ahead`."""
        engine = self.engine
        for generation in generations:
            engine.add(generation)
        while not engine.idle or engine.running:
            step = engine.running
            if step is None:
                parts = engine.plan()
                step = None if parts is None else engine.submit(parts)
            if step is None:
                continue
            if ahead:
                engine.submit_ahead()
            engine.commit(step, await step.handle.result())

    async def answers(
        self, names: Sequence[str], seed: int, **more: Any
    ) -> Mapping[str, tuple[str, str | None]]:
        """Return the text and the end of an answer for each of some schemas."""
        made = {
            name: self.generation(name, schema(SCHEMAS[name]), seed=seed + at, **more)
            for at, name in enumerate(names)
        }
        await self.compute(list(made.values()))
        found = {}
        for name, generation in made.items():
            assert generation.failure is None, (name, generation.failure)
            output = generation.choices[0].take()
            assert output is not None
            found[name] = output.text, output.finish
        return found
