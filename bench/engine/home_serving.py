"""Serve requests that are all there at once by an engine with homes on the device and on the host, or without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.engine.driver import GREEDY
from common.pages.identity import root_id
from engine.decoder.capacity import DecoderCapacity
from engine.decoder.engine import SEVERAL, DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.offload.computed_step import ComputedStep
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue


class HomeService(NamedTuple):
    """Prompts, tokens of each answer, and the largest step; requests of one `scope` share pages."""

    prompts: Sequence[list[int]]
    output: int
    step_tokens: int
    scope: str


class HomeServed(NamedTuple):
    """Seconds from the first step to the last token, the tokens of each answer, and the steps in stages."""

    seconds: float
    tokens: list[list[int]]
    steps: list[ComputedStep]


async def serve(
    executor: TorchExecutor,
    capacity: DecoderCapacity,
    service: HomeService,
    homes: HomePlanner | None,
) -> HomeServed:
    """Serve all requests greedily; RuntimeError if one fails. Without `homes` the device is alone."""
    device, steps = DeviceQueue(), list[ComputedStep]()
    count, vocabulary = len(service.prompts), Vocabulary(executor.tokenizer_json())
    try:
        engine = DecoderEngine(
            executor, capacity, StepLimits(service.step_tokens, count), device, several=SEVERAL, homes=homes
        )  # fmt: skip
        generations = []
        for stream, tokens in enumerate(service.prompts):
            request = GenerationRequest(
                str(stream), [tokens], StopRules(service.output), root_id(executor.fingerprint, service.scope),
                sampling=GREEDY,
            )  # fmt: skip
            generations.append(Generation(request, vocabulary, stream))
            engine.add(generations[-1])
        began = time.perf_counter()
        while not engine.idle or engine.running:
            step = engine.running
            if step is None:
                parts = engine.plan()
                step = None if parts is None else engine.submit(parts)
            if step is None:
                await engine.wait(1.0)
                continue
            engine.submit_ahead()
            engine.commit(step, await step.handle.result())
            if homes is not None and step.rows is not None and homes.computed is not None:
                steps.append(homes.computed)
        seconds = time.perf_counter() - began
        while engine.offload.tiers.moving:  # noqa: ASYNC110 - copies of idle pages notify nobody here
            await asyncio.sleep(0.001)
    finally:
        device.close()
    for generation in generations:
        if generation.failure is not None:
            raise RuntimeError(f"{generation.failure.code}: {generation.failure.message}")
    return HomeServed(seconds, [list(each.choices[0].tokens) for each in generations], steps)
