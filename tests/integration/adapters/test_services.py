"""The worker processes: started as an operator starts them, serving, drained by SIGTERM, refusing bad settings."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.bus import Bus, NewJob, Notifications
from common.config import Common, WorkerConfig
from common.errors import ConfigError
from common.ids import Family, job_id, ulid
from common.registry.models import Models
from common.wire.jobs import EmbedWork, ScoreWork
from common.wire.message import encode
from common.wire.results import EmbedResult, Result, ScoreResult, decode_result
from engine.models.encoders.encoder import Encoder
from services.adapters.worker import load_models
from tests.support import encoder_models

ROOT = Path(__file__).resolve().parents[3]
START_S = 100.0


def start(service: str, config: Common, *flags: str) -> subprocess.Popen[bytes]:
    """Start a worker as its own process, quiet and away from the network."""
    env = {**os.environ, "SPILLWAY_REDIS_URL": config.redis_url, "SPILLWAY_LOG_FORMAT": "json"}
    command = [sys.executable, "-m", f"services.{service}", "--data-dir", config.data_dir, *flags]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


async def embed(bus: Bus, family: Family, fingerprint: str, tokens: list[list[int]]) -> EmbedResult:
    """Return the result of embedding `tokens` on either lane."""
    size = (len(tokens), sum(map(len, tokens)))
    result = await compute(bus, family, EmbedWork(fingerprint=fingerprint, tokens=tokens), size)
    assert isinstance(result, EmbedResult)
    return result


async def compute(
    bus: Bus, family: Family, work: EmbedWork | ScoreWork, size: tuple[int, int]
) -> Result:
    """Admit one job to either lane and return its result."""
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    job = job_id(family, ulid())
    deadline = bus.clock.now_ms() + 30_000
    admission = await bus.admission.admit(
        [NewJob(job, encode(work), *size)],
        classes=("gpu", "cpu"),
        router="r1",
        tenant="t",
        deadline_ms=deadline,
    )
    assert admission.outcome == "admitted", admission
    event = await journal.end(job, deadline)
    await journal.stop()
    assert event.kind == "result", event
    return decode_result(event.data)


async def live(bus: Bus, family: Family, count: int) -> list[Any]:
    """Wait until `count` workers live."""
    async with asyncio.timeout(START_S):
        while True:
            found = await bus.workers.living(family)
            if len(found) >= count:
                return list(found)
            await asyncio.sleep(0.1)


async def test_both_lanes_give_the_same_vectors(bus: Bus, config: Common) -> None:
    """gpu_worker and cpu_worker with MiniLM answer alike, publish one card, and exit 0 on SIGTERM."""
    family = Family("embed.minilm")
    processes = [start("gpu_worker", config, "--device", "cpu", "--threads", "1")]
    try:
        await live(bus, family, 1)
        card = (await Models(bus).cards())["minilm"]
        tokens = [[101, 2003, 102], [101, *range(2000, 2040), 102]]
        first = await embed(bus, family, card.fingerprint, tokens)
        processes.append(start("cpu_worker", config, "--threads", "1", "--instance", "b"))
        records = await live(bus, family, 2)
        assert {record.classes[0] for record in records} == {"gpu", "cpu"}
        assert all(record.depth_tokens >= 8192 for record in records)
        processes[0].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(processes[0].wait, 90) == 0
        second = await embed(bus, family, card.fingerprint, tokens)
        processes[1].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(processes[1].wait, 90) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    rows = [np.frombuffer(result.vectors, "<f4").reshape(2, 384) for result in (first, second)]
    assert ((rows[0] * rows[1]).sum(axis=1) >= 0.9995).all()
    assert await bus.workers.living(family) == []
    assert json.loads(await Models(bus).tokenizer("minilm"))["truncation"] is None


async def test_the_sim_device(bus: Bus, config: Common) -> None:
    """The sim device serves the real protocol under its own name, marked as simulated, by its stated costs."""
    process = start("gpu_worker", config, "--device", "sim", "--alpha", "0.001", "--beta", "0.004")
    try:
        (record,) = await live(bus, Family("embed.sim"), 1)
        card = (await Models(bus).cards())["sim"]
        one = await embed(bus, Family("embed.sim"), card.fingerprint, [[1, 2], [3]])
        two = await embed(bus, Family("embed.sim"), card.fingerprint, [[3], [1, 2]])
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.communicate()
    assert (record.device, record.alpha_items_s, record.beta_s) == ("sim", 0.001, 0.004)
    rows = [np.frombuffer(result.vectors, "<f4").reshape(2, 384) for result in (one, two)]
    assert (rows[0] == rows[1][::-1]).all()
    assert np.linalg.norm(rows[0], axis=1) == pytest.approx([1, 1], rel=1e-5)


async def test_rerank_has_its_own_family(bus: Bus, config: Common, tmp_path: Path) -> None:
    """A configured cross-encoder serves `rerank.<name>` beside the encoder, with its own scores and a sigmoid."""
    for name, labels in (("small-encoder", 0), ("small-ranker", 1)):
        (tmp_path / name).mkdir()
        encoder_models.save(tmp_path / name, "bert", labels=labels)
    places = [str(tmp_path / name) for name in ("small-encoder", "small-ranker")]
    flags = ("--embed-model", places[0], "--rerank-model", places[1], "--dtype", "fp32")
    process = start("cpu_worker", config, *flags)
    try:
        await live(bus, Family("rerank.small-ranker"), 1)
        await live(bus, Family("embed.small-encoder"), 1)
        card = (await Models(bus).cards())["small-ranker"]
        pairs, types = (
            encoder_models.texts(3),
            [[0] * len(text) for text in encoder_models.texts(3)],
        )
        work = ScoreWork(fingerprint=card.fingerprint, pairs=pairs, types=types)
        result = await compute(bus, Family(card.family), work, (3, 60))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.communicate()
    assert isinstance(result, ScoreResult)
    expected = Encoder.load(places[1], dtype="fp32").score(pairs, types)
    assert result.raw == pytest.approx(expected.tolist(), rel=1e-4)
    assert result.scores == pytest.approx((1 / (1 + np.exp(-expected))).tolist(), rel=1e-4)


def test_models_in_the_wrong_place(tmp_path: Path) -> None:
    """An encoder as cross-encoder, or the other way round, stops the start with what was expected."""
    encoder_models.save(tmp_path, "bert")
    with pytest.raises(ConfigError, match="no classification head"):
        load_models(WorkerConfig(rerank_model=str(tmp_path), embed_model=str(tmp_path)))
    encoder_models.save(tmp_path, "bert", labels=1)
    with pytest.raises(ConfigError, match="expected an encoder"):
        load_models(WorkerConfig(embed_model=str(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--embed-model", "/no/such/model"), "no such directory"),
        (("--device", "quantum"), "--device is 'quantum'"),
        (("--alpha", "-1", "--device", "sim"), "--alpha"),
        (("--beta", "nan", "--device", "sim"), "finite|--beta"),
        (("--embed-slo-s", "inf"), "finite|--embed-slo-s"),
        (("--dtype", "int8"), "--dtype is 'int8': expected one of auto, fp32, bf16"),
    ],
)
def test_bad_settings_stop_the_start(flags: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    """A setting that cannot be served ends the start with status 2 and a sentence that names it."""
    command = [sys.executable, "-m", "services.cpu_worker", "--data-dir", str(tmp_path), *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 2
    assert re.search(sentence, done.stderr)
    assert "Traceback" not in done.stderr


def test_sim_needs_no_torch() -> None:
    """The sim device and the worker's common parts load no torch."""
    code = (
        "import sys, services.adapters.worker, engine.encoder.simulated, services.adapters.generate.metrics\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
