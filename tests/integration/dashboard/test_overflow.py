"""The panel "Accelerator and overflow" in a real browser, over two lanes of sim devices that are driven to spill."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.mesh import Mesh, Process

OBJECTIVE_S = "1"
# Seconds a token and a batch. A query of 75 tokens takes 30 ms and 120 ms, so 32 and 7 fit into the objective at once.
ACCELERATOR = ("0.0004", "0.02")
CPU = ("0.0016", "0.05")
QUERY = " ".join(["water"] * 73)  # and two special tokens
BURST = 64
SPILLS = re.compile(r"^[1-9]\d* %: [1-9]\d* of \d+ jobs$")


class TwoLanes(Mesh):
    """Sim devices on both lanes and a router; nothing else is needed for embeddings."""

    def _start(self) -> None:
        self.accelerator = self._device("gpu_worker", *ACCELERATOR)
        self.cpu = self._device("cpu_worker", *CPU)
        self.router = self.add_router("0")
        self.url = self.address(self.router)
        self.wait_ready(self.url)
        while len([w for w in self.told()["workers"] if w["kind"] == "embed"]) < 2:
            time.sleep(0.1)  # the router may know a worker a moment later than it is ready

    def _device(self, service: str, alpha: str, beta: str) -> Process:
        flags = ("--device", "sim", "--alpha-tokens", alpha, "--beta", beta, "--threads", "1")
        return self.add(service, "0", *flags, "--embed-slo-s", OBJECTIVE_S)

    def told(self) -> Any:
        """Return what the router tells of the mesh."""
        with urllib.request.urlopen(f"{self.url}/v1/mesh", timeout=60) as answer:
            return json.loads(answer.read())

    def burst(self) -> list[int]:
        """Send BURST queries at once and return the statuses of their answers."""
        body = json.dumps({"input": QUERY}).encode()

        def one(_: int) -> int:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/embeddings", body, 60) as answer:
                    status: int = answer.status
            except urllib.error.HTTPError as error:
                status = error.code
            return status

        with ThreadPoolExecutor(BURST) as threads:
            return list(threads.map(one, range(BURST)))


@pytest.fixture(scope="module")
def lanes() -> Iterator[TwoLanes]:
    """Two lanes, once they have spilled."""
    made = TwoLanes()
    try:
        assert set(made.burst()) == {200, 429}
        yield made
    finally:
        made.close()


def open_panel(page: Page, mesh: Mesh) -> Locator:
    page.goto(f"{mesh.url}/#/mesh")
    expect(page.locator("#state .words")).to_have_text("live")
    return page.get_by_label("Accelerator and overflow")


def test_lanes_side_by_side(page: Page, lanes: TwoLanes) -> None:
    """Both lanes show what they measured and the line through it, what spilled and was refused, depths and saving."""
    panel = open_panel(page, lanes)
    expect(panel.locator("h4")).to_have_text(["Accelerator", "CPU"])
    for lane in panel.locator(".overflow-lane").all():
        expect(lane.locator(".plot-point").first).to_be_attached()
        expect(lane.locator(".plot-line")).to_be_attached()
        expect(lane.locator(".took")).to_have_text(SPILLS)
        expect(lane.locator(".margin")).to_contain_text("of a prediction")
        expect(lane.locator(".holds")).to_contain_text("items")
    expect(panel.locator("dt", has_text="Spilled")).to_have_count(1)
    expect(panel.locator(".fitted")).to_contain_text(["20 ms + 400 µs a token", "50 ms + 1.6 ms"])
    expect(panel.locator(".policy")).to_contain_text("windve-tokens")
    expect(panel.locator(".refused-lately")).to_contain_text("no lane could finish in time")
    rows = panel.get_by_role("row")
    expect(rows).to_have_count(4)
    expect(rows.nth(1)).to_contain_text("Accelerator32")
    expect(rows.nth(2)).to_contain_text("CPU7")
    expect(rows.nth(3)).to_contain_text("Saving18 %")

    expect(panel.locator(".plot-objective")).to_have_count(0)  # batches end long before it


def test_every_viewer_sees_the_same_points(browser: Browser, lanes: TwoLanes) -> None:
    """The router keeps the points: a page opened later shows those that were measured before it, and new ones."""
    device = "[data-class=gpu] .plot-point"
    with browser.new_page() as page:
        panel = open_panel(page, lanes)
        expect(panel.locator(device).first).to_be_attached()
        [before] = [len(w["measured"]) for w in lanes.told()["workers"] if w["classes"] == ["gpu"]]
        lanes.burst()
        expect(panel.locator(device).nth(before)).to_be_attached()
    with browser.new_page() as later:
        panel = open_panel(later, lanes)
        expect(panel.locator(device).nth(before)).to_be_attached()
        expect(panel.locator(f"{device}.last")).to_have_count(1)


def test_an_objective_in_range_and_a_lost_worker(page: Page, lanes: TwoLanes) -> None:
    """The objective is a line where the plot reaches so far; of a worker that died the points stay."""

    def otherwise(route: Route) -> None:
        mesh = route.fetch().json()
        for worker in mesh["workers"]:
            worker["cost"]["slo_s"] = 0.01
            worker["state"] = "lost" if worker["classes"] == ["cpu"] else worker["state"]
        for lane in mesh["lanes"]:
            lane["workers"] = 0 if lane["class"] == "cpu" else lane["workers"]
        route.fulfill(json=mesh)

    page.route("**/v1/mesh", otherwise)
    panel = open_panel(page, lanes)
    expect(panel.locator(".plot-objective")).to_have_count(2)
    expect(panel.get_by_text("objective 10 ms", exact=True)).to_have_count(2)
    cpu = panel.locator("[data-class=cpu]")
    expect(cpu.locator(".lane-share")).to_have_text("no worker")
    expect(cpu.locator(".pill")).to_have_text("lost")
    expect(cpu.locator(".plot-point").first).to_be_attached()
    expect(panel.get_by_role("row").nth(2)).to_contain_text("CPU0")
    page.unroute_all(behavior="wait")


def test_narrow_light_and_dark(browser: Browser, lanes: TwoLanes) -> None:
    """At 360 pixels nothing is scrolled sideways, plots keep the size of their words, and both schemes differ."""
    strokes = set()
    for scheme in ("light", "dark"):
        context = browser.new_context(
            viewport={"width": 360, "height": 740},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page = context.new_page()
        panel = open_panel(page, lanes)
        line = panel.locator(".plot-line").first
        expect(line).to_be_attached()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        plot = panel.locator(".plot").first
        across, words = plot.evaluate("e => [e.clientWidth, e.viewBox.baseVal.width]")
        assert across == words
        assert 240 < across < 360
        strokes.add(line.evaluate("e => getComputedStyle(e).stroke"))
        context.close()

    assert len(strokes) == 2


def test_one_kind_of_device(page: Page, lanes: TwoLanes) -> None:
    """Without a CPU lane a sentence says that nothing spills, and the line is all that is shown."""
    panel = open_panel(page, lanes)
    expect(panel.get_by_role("table")).to_be_visible()
    assert lanes.cpu.stop() == 0
    expect(panel.get_by_text("one kind of device, so no job spills")).to_be_visible()
    expect(panel.locator(".overflow-lane")).to_have_count(1)
    expect(panel.locator(".plot-line")).to_be_attached()
    expect(panel.get_by_role("table")).to_have_count(0)
    expect(panel.get_by_role("meter")).to_have_count(0)
