"""A gpu_worker that attends to decoding sequences on the host: the device's tokens, kept costs, settings refused."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from bench.engine import random_models
from bench.engine.helper_process import helper_process, local_address, wait_until
from common.bus import Bus, Notifications
from common.config import Common, WorkerConfig
from common.errors import ConfigError
from common.ids import Family
from common.registry.latest_steps import LatestSteps
from common.types.generation import SamplingParams
from common.types.helper_address import ChannelKind, HelperAddress
from common.wire.jobs import GenerateWork
from common.wire.registry import StepRecord
from engine.decoder.executor.interface import Moved
from engine.decoder.executor.torch_executor import TorchExecutor
from services.adapters.generate.generator import Generator
from services.adapters.metrics import WorkMetrics
from tests.faults.engine.test_failover import live, process
from tests.support.engine import Desk, running, tokens_of
from tests.support.servers import free_port
from tests.support.waiting import until


@contextmanager
def attached(address: HelperAddress, config: Common) -> Iterator[subprocess.Popen[bytes]]:
    """Run a helper that has attached to the gpu_worker at an address."""
    port = free_port()
    with helper_process(address, Path(config.data_dir), "--health-port", str(port)) as helper:
        url = f"http://127.0.0.1:{port}/readyz?wait=30"

        def ready() -> bool:
            try:
                with urllib.request.urlopen(url) as answer:
                    return bool(answer.status == 200)
            except OSError:  # not started yet, or not attached
                return False

        wait_until(ready)
        yield helper


@pytest.mark.parametrize("channel", [None, *get_args(ChannelKind)])
async def test_a_worker_attends_on_the_host(
    bus: Bus,
    config: Common,
    tmp_path: Path,
    channel: ChannelKind | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs get the tokens of an engine without homes; metrics say who attended; the costs are kept in a file.

    So it is with a helper that is killed in mid-stream, and with the next one.
    """
    directory = tmp_path / "m"
    random_models.write(directory, "llama", random_models.settings("llama", 2))
    alone = TorchExecutor.load(
        str(directory), device="cpu", dtype="fp32", threads=1, kv_bytes=4 << 20
    )
    greedy = SamplingParams(temperature=0.0)
    asked = [
        GenerateWork(
            fingerprint=alone.fingerprint, scope="t", max_new=30, n=1 + number % 2, sampling=greedy,
            prompts=[[(number * 7 + at) % random_models.VOCABULARY for at in range(40 + 9 * number)]],
        )
        for number in range(6)
    ]  # fmt: skip
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    family = Family(alone.card(created_ms=0, partitions=1).family)
    desk = Desk(bus, journal, family)
    async with running(bus, alone):
        expected = [await desk.result(await desk.admit(one)) for one in asked]
    port = free_port()
    flags = [
        "--embed-model", "none", "--chat-model", str(directory), "--device", "cpu", "--threads", "1",
        "--chat-dtype", "fp32", "--kv-bytes", str(1 << 20), "--host-kv-bytes", str(4 << 20),
        "--host-attention", "full", "--health-port", str(port),
    ]  # fmt: skip
    helped = channel is not None
    if channel is not None:
        address = local_address(channel, tmp_path)
        flags += ["--host-socket", str(address)]
        monkeypatch.setenv("SPILLWAY_HOST_SECRET", address.secret)
    with process(config, *flags) as worker, ExitStack() as stack:
        await live(bus, family, 1)
        if helped:
            helper = stack.enter_context(attached(address, config))
        jobs = [await desk.admit(one) for one in asked]
        if helped:
            await desk.until(jobs[0], 3)
            helper.kill()
            stack.enter_context(attached(address, config))
        found = [await desk.result(job) for job in jobs]
        if helped:  # the second helper may have come after the last token
            found[0] = await desk.result(await desk.admit(asked[0]))
        [name] = await bus.workers.records(family)

        async def step() -> StepRecord | None:
            return (await LatestSteps(bus).of(family, [name])).get(name)

        shown = await until(step, "the latest step is published")
        url = f"http://127.0.0.1:{port}/metrics"
        told = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 40) == 0
    await journal.stop()

    for one, (left, _), (right, _) in zip(asked, expected, found, strict=True):
        for choice in range(one.n):
            assert tokens_of(right, choice) == tokens_of(left, choice)
    values = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    assert float(values['spillway_decoded_rows_total{attended="host"}']) > 0
    assert (float(values['spillway_host_layers_total{by="helper"}']) > 0) == helped
    assert (float(values['spillway_host_layers_total{by="worker"}']) > 0) == helped
    for kind in get_args(ChannelKind):
        assert float(values[f'spillway_host_helper{{channel="{kind}"}}']) == (kind == channel)
    for moved in get_args(Moved):
        size = float(values[f'spillway_host_channel_bytes_total{{kind="{moved}"}}'])
        assert (size > 0) == (channel == "tcp")
    assert float(values['spillway_staged_steps_seconds_total{kind="predicted"}']) > 0
    assert float(values['spillway_staged_steps_seconds_total{kind="measured"}']) > 0
    assert float(values['spillway_stage_idle_seconds_total{side="device"}']) > 0
    assert shown is not None
    assert {each.stage for each in shown.stages} >= {"before", "host", "after"}
    assert all(0 <= each.begin_s <= each.end_s <= shown.measured_s for each in shown.stages)
    assert len(list((Path(config.data_dir) / "cache").glob("offload-*.json"))) == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "sim", "chat_model": "sim"}, "sim device"),
        ({"host_cores": "a"}, "SPILLWAY_HOST_CORES"),
        ({"host_kv_bytes": 0}, "SPILLWAY_HOST_KV_BYTES"),
        ({"host_socket": "/dev/null/x"}, "SPILLWAY_HOST_SOCKET"),
        ({"host_socket": "x" * 120}, "SPILLWAY_HOST_SOCKET"),
        (
            {"host_socket": "tcp://203.0.113.1:7070", "host_secret": "s" * 16},
            "SPILLWAY_HOST_SOCKET",
        ),
        ({"host_socket": "tcp://127.0.0.1:7070", "host_secret": "short"}, "SPILLWAY_HOST_SECRET"),
    ],
)
def test_settings_that_cannot_be_met(
    settings: dict[str, object], named: str, tmp_path: Path
) -> None:
    """Attention on the host is refused on the sim device, on cores that are none, without pages on the host, and with a
    path for helpers where no socket can be.
    """
    random_models.write(tmp_path, "llama", random_models.settings("llama", 2))
    chosen = {"chat_model": str(tmp_path), "device": "cpu", "kv_bytes": 1 << 20} | settings
    config = WorkerConfig(host_attention="auto", **chosen)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=named):
        Generator(config, "gpu_worker", WorkMetrics(CollectorRegistry())).load()
