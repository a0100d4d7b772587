"""Dashboards and alerts ask for what a running mesh tells, and nothing is told that they do not ask for."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.mesh import ROOT, Mesh
from tests.support.promql import selectors

DEPLOY = ROOT / "deploy"
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
RULES = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
ADDED = {"instance"}  # by Prometheus, to every series it scrapes
NOT_MADE_HERE = {"status"}  # failures of requests, which a mesh in order has none of
WAIT_S = 60.0
SUFFIXES = ("_bucket", "_count", "_sum")
Series = dict[str, list[dict[str, str]]]


class Observed(Mesh):
    """A mesh of every service, each on the sim device where it has one."""

    def _start(self) -> None:
        sim = ("--device", "sim", "--threads", "1")
        for service in ("gpu_worker", "cpu_worker"):
            self.add(service, "0", *sim)
        self.add("vector_search", "0", "--audit-s", "1")
        self.add("kv_store", "0")
        self.url = self.address(self.add_router("0", "--planned-costs", "embed:1:8=0.005"))
        self.wait_ready(self.url)
        self.add_generator()

    def scrape(self) -> Series:
        """Return every series of every process by name."""
        found: Series = {}
        for process in self.processes:
            url = f"http://127.0.0.1:{process.ports()['health_port']}/metrics"
            with urllib.request.urlopen(url, timeout=10) as reply:
                text = reply.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append(dict(sample.labels))
        return {name: rows for name, rows in found.items() if name.startswith("spillway_")}


def expressions() -> Iterator[tuple[str, str, str]]:
    """Yield where, what and the legend of every expression of dashboards and alerts."""
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"], target["legendFormat"]
    for group in RULES:
        for rule in group["rules"]:
            told = " ".join(rule["annotations"].values())
            legend = " ".join(f"{{{{{name}}}}}" for name in re.findall(r"\$labels\.(\w+)", told))
            yield rule["alert"], rule["expr"], legend


def plain(expression: str) -> str:
    """Return an expression with Grafana's variables filled in."""
    return re.sub(r"\$(?!__)\w+", ".*", expression.replace("$__rate_interval", "5m"))


async def use(url: str) -> None:
    """Do a little of everything: embed, ingest, search, chat in a session, and erase it."""
    async with aiohttp.ClientSession(url) as http:

        async def post(path: str, body: Any) -> Any:
            async with http.post(path, json=body) as response:
                assert response.status < 300, await response.text()
                raw = await response.read()
                return raw if body.get("stream") else json.loads(raw)

        await post("/v1/embeddings", {"input": [f"text {n}" for n in range(40)], "model": "sim"})
        await post("/v1/collections", {"name": "pages"})
        texts = [{"id": f"d{n}", "text": f"page number {n}"} for n in range(30)]
        await post("/v1/collections/pages/documents", {"documents": texts})
        await post("/v1/collections/pages/search", {"text": "page number 3", "k": 3})
        session = (await post("/v1/sessions", {"model": "sim-chat"}))["id"]
        ask = {"model": "sim-chat", "messages": [{"role": "user", "content": "hello " * 40}]}
        await post("/v1/chat/completions", {**ask, "session": session, "max_tokens": 40})
        grounded = {**ask, "retrieval": {"collection": "pages"}, "stream": True, "max_tokens": 9}
        await post("/v1/chat/completions", grounded)
        async with http.delete(f"/v1/sessions/{session}") as response:
            assert response.status == 200, await response.text()


@pytest.fixture(scope="module")
def told() -> Iterator[Series]:
    """What a mesh tells after some work, once its router has looked around and an audit was due."""
    mesh = Observed()
    try:
        asyncio.run(use(mesh.url))
        give_up = time.monotonic() + WAIT_S
        while not _settled(found := mesh.scrape()) and time.monotonic() < give_up:
            time.sleep(0.3)
        yield found
    finally:
        mesh.close()


def _settled(told: Series) -> bool:
    lanes = {row["lane"] for row in told.get("spillway_lane_depth", ())}
    searched = any(lane.startswith("search/") for lane in lanes)
    return searched and "spillway_index_recall_ratio" in told


@pytest.mark.parametrize("server", ["redis6", "redis7"])
def test_no_redis_makes_a_mesh_fail(server: str) -> None:
    """The same work on other servers than the embedded one: no process logs an error."""
    mesh = Observed(server)
    try:
        asyncio.run(use(mesh.url))
        logs = [line for process in mesh.processes for line in process.log.read_text().splitlines()]
        assert [line for line in logs if '"level": "error"' in line or "Traceback" in line] == []
    finally:
        mesh.close()


def test_every_expression_asks_for_what_is_told(told: Series) -> None:
    """Each metric exists, with each label that is matched, grouped by or shown, and with the values asked for."""
    wrong = []
    for where, expression, legend in expressions():
        kept: set[str] = set()
        for selector in selectors(plain(expression)):
            rows = told.get(selector.metric)
            if rows is None:
                wrong.append(f"{where}: nobody tells {selector.metric}")
                continue
            labels = set().union(*rows) | ADDED
            kept |= selector.grouped or labels
            if missing := selector.names - labels:
                wrong.append(f"{where}: {selector.metric} has no label {missing}")
            made = selector.names.isdisjoint(NOT_MADE_HERE)
            if made and not any(selector.matches(row) for row in rows):
                wrong.append(f"{where}: no {selector.metric} is {selector.matchers}")
        if missing := set(re.findall(r"\{\{(\w+)\}\}", legend)) - kept:
            wrong.append(f"{where}: shows {missing}, which the result has not")
    assert wrong == []


def test_whatever_is_told_is_asked_for(told: Series) -> None:
    """No metric without a panel or an alert."""
    asked = {one.metric for _, text, _ in expressions() for one in selectors(plain(text))}

    def name(series: str) -> str:
        stem = next((series.removesuffix(s) for s in SUFFIXES if series.endswith(s)), series)
        return stem if f"{stem}_bucket" in told else series

    assert {name(series) for series in told} == {name(series) for series in asked}


def test_every_alert_says_what_to_do() -> None:
    """Each has a severity, a sentence and a paragraph in alerts.md under its name; no name twice."""
    manual = (ROOT / "docs" / "alerts.md").read_text()
    rules = [rule for group in RULES for rule in group["rules"]]
    headings = re.findall(r"^## (Spillway\w+)$", manual, re.MULTILINE)

    assert [rule["alert"] for rule in rules] == headings
    for rule in rules:
        name = rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"


def test_panels_can_be_read() -> None:
    """Every panel has a description, a unit and a place of its own; every expression is one."""
    for path in BOARDS:
        board = json.loads(path.read_text())
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells
            if panel["type"] != "row":
                assert panel["description"].endswith("."), panel["title"]
                assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    for _, text, _ in expressions():
        selectors(plain(text))


@pytest.mark.parametrize(
    "text", ["sum(rate(a[5m])", "sum by (x) a)", "rats(a)", "a{b=}", "1 +", "max(a) > > 'x'"]
)
def test_what_is_no_expression_is_found(text: str) -> None:
    """The test's own reader refuses what Prometheus would."""
    with pytest.raises(ValueError, match=r"."):
        selectors(text)


def test_prometheus_reads_the_rules() -> None:
    """The scrape configuration names the file of rules beside it."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())

    assert [(DEPLOY / name).exists() for name in config["rule_files"]] == [True]
    assert all(Path(path).suffix == ".json" for path in BOARDS)
