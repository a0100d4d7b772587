"""The alert rules in a real Prometheus that scrapes a running mesh: quiet while all is well, firing while it is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.mesh import ROOT, Mesh
from tests.support.servers import free_port
from tests.support.waiting import until_sync

WAIT_S = 60.0
SCRAPES = 4  # a second apart, before silence is believed


class Scraped(Mesh):
    """A mesh with a generator, and a Prometheus that looks at all of it every second; `url` is its own."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self.add("kv_store", "0")
        self.generator = self.add_generator()
        place = self.directory / "prometheus"
        place.mkdir()
        self.prometheus = f"http://127.0.0.1:{free_port()}"
        (place / "alerts.yaml").write_text(yaml.safe_dump(at_once()))
        (place / "prometheus.yml").write_text(yaml.safe_dump(self._config()))
        listen = self.prometheus.removeprefix("http://")
        words = [
            f"--config.file={place}/prometheus.yml",
            f"--storage.tsdb.path={place}/data",
            f"--web.listen-address={listen}",
        ]
        with (place / "log").open("wb") as log:
            self._scraper = subprocess.Popen([program, *words], stdout=log, stderr=log)

    def _config(self) -> dict[str, Any]:
        targets = [f"127.0.0.1:{process.ports()['health_port']}" for process in self.processes]
        return {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [{"job_name": "spillway", "static_configs": [{"targets": targets}]}],
        }

    def firing(self) -> dict[str, str]:
        """Return the summary of each alert that fires, by name."""
        return {
            row["labels"]["alertname"]: row["annotations"]["summary"]
            for row in self._ask("/api/v1/alerts")["alerts"]
            if row["state"] == "firing"
        }

    def scrapes(self) -> int:
        """Return how often the process scraped most has been."""
        found = self._ask("/api/v1/query?query=count_over_time(spillway_build_info%5B5m%5D)")[
            "result"
        ]
        return max((int(row["value"][1]) for row in found), default=0)

    def _ask(self, path: str) -> Any:
        give_up = time.monotonic() + WAIT_S
        while True:
            try:
                with urllib.request.urlopen(self.prometheus + path, timeout=10) as reply:
                    return json.loads(reply.read())["data"]
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        self._scraper.kill()
        self._scraper.wait()
        super().close()


def at_once() -> dict[str, Any]:
    """Return the rules, each firing as soon as it holds."""
    rules: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    return rules


@pytest.fixture(scope="module")
def mesh() -> Iterator[Scraped]:
    """A mesh under the eyes of Prometheus."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is missing; `make setup-full` installs it")
    made = Scraped(program)
    try:
        yield made
    finally:
        made.close()


def _until(mesh: Scraped, *wanted: str) -> dict[str, str]:
    found: dict[str, str] = {}

    def firing() -> bool:
        found.clear()
        found.update(mesh.firing())
        return set(found) == set(wanted)

    until_sync(firing, f"the alerts are {wanted}", seconds=WAIT_S)
    return found


def test_what_is_lost_is_told(mesh: Scraped) -> None:
    """Nothing fires in a mesh in order; a killed generator is named until it is back, and a killed router is named."""
    until_sync(lambda: mesh.scrapes() >= SCRAPES, "the mesh is scraped", seconds=WAIT_S)
    _until(mesh)
    mesh.generator.kill()
    assert "chat.sim-chat" in _until(mesh, "SpillwayNoWorker")["SpillwayNoWorker"]
    mesh.generator.start()
    _until(mesh)

    mesh.router.kill()
    _until(mesh, "SpillwayNoRouter")
