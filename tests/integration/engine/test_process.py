"""The gpu_worker process: encoder and generator side by side, either alone, and settings that serve nothing."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from common.bus import Bus
from common.config import Common
from common.ids import Family
from common.registry.models import Models
from tests.faults.engine.test_failover import ROOT, live, process
from tests.integration.adapters.test_services import embed
from tests.integration.engine.test_generation import said
from tests.support.engine import FAMILY, Desk, text_of, work
from tests.support.servers import free_port


async def test_one_process_serves_both(bus: Bus, desk: Desk, config: Common) -> None:
    """One process has a lane in each family, works on both at once, tells its metrics, and drains by SIGTERM."""
    port = free_port()
    flags = (
        "--device",
        "sim",
        "--chat-model",
        "sim",
        "--health-port",
        str(port),
        "--beta",
        "0.002",
    )
    with process(config, *flags) as one:
        await live(bus, FAMILY, 1)
        await live(bus, Family("embed.sim"), 1)
        cards = await Models(bus).cards()
        assert (cards["sim"].kind, cards["sim-chat"].kind) == ("embed", "generate")
        records = await bus.workers.living(FAMILY)
        assert (records[0].classes, records[0].service) == (["gpu"], "gpu_worker")
        assert records[0].depth_items >= 1000
        jobs = [await desk.admit(work(f"p{n}", max_new=60)) for n in range(5)]
        vectors = await embed(bus, Family("embed.sim"), cards["sim"].fingerprint, [[1], [2, 3]])
        assert len(vectors.vectors) == 2 * 4 * vectors.dimension
        for n, job in enumerate(jobs):
            pieces, _ = await desk.result(job)
            assert text_of(pieces) == said(f"p{n}", 60)
        url = f"http://127.0.0.1:{port}/metrics"
        told = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        assert 'spillway_tokens_total{kind="output",model="sim-chat"} 300.0' in told
        assert 'spillway_pages{state="cached",tier="device"}' in told
        assert 'spillway_jobs_total{lane="embed.sim/0:gpu",outcome="ok"} 1.0' in told
        assert 'spillway_jobs_total{lane="chat.sim-chat/0:gpu",outcome="ok"} 5.0' in told
        one.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(one.wait, 40) == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--embed-model", "none", "--chat-model", "none"), "would serve nothing"),
        (("--embed-model", "none", "--chat-model", "/no/such/model"), "/no/such/model"),
    ],
)
def test_bad_settings_stop_the_start(flags: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    """What cannot be served ends the start with status 2 and a sentence that names it."""
    import re

    command = [sys.executable, "-m", "services.gpu_worker", "--data-dir", str(tmp_path), *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert re.search(sentence, done.stderr)
    assert "Traceback" not in done.stderr


def test_deciding_loads_no_torch() -> None:
    """The control plane and the sim device need no torch."""
    code = (
        "import sys, services.adapters.generate.loop, services.adapters.generate.generator\n"
        "import engine.decoder.executor.simulated_executor\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
