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

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from bench.engine import home_runs, random_models
from bench.engine.helper_process import helper_process, local_address, wait_until
from bench.engine.home_runs import FixedProfile, HomeRun, HomeSides, Work
from common.bus import Bus, Notifications
from common.config import Common, WorkerConfig
from common.cost.linear import Probe
from common.errors import ConfigError
from common.ids import Family
from common.pages.identity import PAGE
from common.registry.latest_steps import LatestSteps
from common.types.generation import SamplingParams
from common.types.helper_address import ChannelKind, HelperAddress
from common.wire.jobs import GenerateWork
from common.wire.registry import StepRecord
from engine.decoder.executor.interface import Moved
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.offload.costs import OffloadPoints
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.offload.plan import OffloadMode
from engine.device import DeviceQueue
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


GREEDY = SamplingParams(temperature=0.0)
# Seconds of a row in one layer, of a token attended to on the host, and of copying a page: a machine for each use.
MACHINES = {"attend": (1e-3, 1e-9, 1.0), "fetch": (1e-3, 1.0, 1e-9), "recompute": (1e-9, 1.0, 1.0)}
BOTH = (1e-3, 1e-6, 5e-2)  # pages come slowly, and the host attends best to what is there already


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeSides]:
    found = home_runs.sides("llama fp32", tmp_path_factory.mktemp("llama"))
    yield found
    found.executor.close()


def machine(use: str) -> OffloadPoints:
    """Return costs by which one use of a history on the host is by far the cheapest."""
    row_s, host_s, page_s = (MACHINES | {"split": BOTH})[use]
    sizes = ((1, 32), (1, 300), (4, 400))
    return msgspec.structs.replace(
        home_runs.POINTS,
        linear=[(rows, rows * row_s) for rows in (1, 16, 256)],
        host=[Probe(count, tokens, tokens * host_s) for count, tokens in sizes],
        prefill=[Probe(count, tokens, tokens * 1e-12) for count, tokens in sizes],
        exchange=[Probe(count, 0, 1e-12) for count, _ in sizes],
        page_s=page_s,
    )


def test_fronts_are_for_plans_that_choose(tmp_path: Path) -> None:
    """Sequences over both tiers are refused where a mode does not choose."""
    random_models.write(tmp_path, "llama", random_models.settings("llama", 2))
    for mode in ("off", "full"):
        config = WorkerConfig(
            chat_model=str(tmp_path), device="cpu", host_attention=mode, host_split=True
        )
        with pytest.raises(ConfigError, match="SPILLWAY_HOST_SPLIT is on"):
            Generator(config, "gpu_worker", WorkMetrics(CollectorRegistry())).load()


def work(prompt: list[int], max_new: int, n: int = 1) -> Work:
    return Work(prompt, n, max_new, GREEDY, 0, None, None, low=False)


@pytest.mark.parametrize("use", MACHINES)
async def test_a_turn_goes_on_where_its_history_costs_least(sides: HomeSides, use: str) -> None:
    """A first turn leaves its pages on the host; the second attends to them there, or has them fetched or computed.

    Counters tell which, and that attending in place has brought no page to the device.
    """
    device = DeviceQueue()
    try:
        profile = FixedProfile(machine(use))
        homes = HomePlanner(sides.executor, profile, OffloadMode.FULL)
        run, alone = HomeRun(sides.executor, device, homes), HomeRun(sides.alone, device, None)
        prompt = [at * 7 % random_models.VOCABULARY for at in range(100)]
        [[answer]] = await run.all([work(prompt, 20)])
        question = [*prompt, *answer, *range(20)]
        homes.mode = OffloadMode.ASYMMETRIC
        tiers = run.engine.scheduler.table.tiers
        found, pages = tiers.found.copy(), homes.host_pages.copy()
        attended, steps = dict(sides.executor.attended), len(run.steps)
        [[told]] = await run.all([work(question, 12)])
        expected = await alone.all([work(prompt, 20), work(question, 12)])
    finally:
        device.close()
    on_host = sides.executor.attended["host"] - attended["host"]

    assert [[answer], [told]] == expected
    assert dict(homes.resumed) == {use: 1}
    assert tiers.found["host"] - found["host"] == (0 if use == "recompute" else 3)
    assert tiers.found["computed"] - found["computed"] == (5 if use == "recompute" else 2)
    assert tiers.found["device"] == found["device"]
    if use != "attend":
        assert homes.host_pages == pages
        return
    assert homes.host_pages["found"] - pages["found"] == 3
    assert homes.host_pages["copied"] == pages["copied"]
    assert run.steps[steps].why == "in place"
    assert {stage.stage for stage in run.steps[steps].stages} == {"before", "host", "after"}
    assert on_host >= len(question) - 96


async def test_a_turn_goes_on_over_both_tiers(tmp_path: Path) -> None:
    """A second turn attends to 8 pages of its history on the host, and to the rest, of which one page is fetched, here.

    Counters tell so, and that it never had the 8 pages on the device; its tokens are the device's.
    """
    sides, device = home_runs.sides("llama fp32", tmp_path, sizes=home_runs.LONG), DeviceQueue()
    try:
        profile = FixedProfile(machine("split"))
        homes = HomePlanner(sides.executor, profile, OffloadMode.FULL, split=True)
        run = HomeRun(sides.executor, device, homes, 512)
        alone = HomeRun(sides.alone, device, None, 512)
        prompt = [at * 7 % random_models.VOCABULARY for at in range(290)]
        [[answer]] = await run.all([work(prompt, 20)])
        question = [*prompt, *answer, *range(20)]
        homes.mode = OffloadMode.ASYMMETRIC
        tiers = run.engine.scheduler.table.tiers
        found, pages, both = tiers.found.copy(), homes.host_pages.copy(), sides.executor.on_both
        [[told]] = await run.all([work(question, 12)])
        expected = await alone.all([work(prompt, 20), work(question, 12)])
    finally:
        device.close()
        sides.executor.close()

    assert [[answer], [told]] == expected
    assert dict(homes.resumed) == {"split": 1}
    assert homes.host_pages["found"] - pages["found"] == 8
    assert tiers.found["host"] - found["host"] == 9
    assert tiers.found["device"] == found["device"]
    assert sides.executor.on_both - both >= len(question) - 9 * PAGE
    assert homes.on_both > 0


async def test_choices_share_their_prompt_on_the_host(sides: HomeSides) -> None:
    """Three choices at home on the host have the prompt's pages once: none is copied, and tokens are the device's."""
    device = DeviceQueue()
    try:
        homes = HomePlanner(sides.executor, FixedProfile(home_runs.POINTS), OffloadMode.FULL)
        run, alone = HomeRun(sides.executor, device, homes), HomeRun(sides.alone, device, None)
        prompt = [at * 5 % random_models.VOCABULARY for at in range(100)]
        found = await run.all([work(prompt, 20, n=3)])
        expected = await alone.all([work(prompt, 20, n=3)])
    finally:
        device.close()

    assert found == expected
    assert dict(homes.host_pages) == {"shared": 6}
    assert dict(homes.resumed) == {"attend": 2}
