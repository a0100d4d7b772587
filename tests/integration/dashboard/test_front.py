"""The panel "Plan" in a real browser, over a mesh that `spillway up --plan` started."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from cli.planned_services import fingerprint
from planner.deployment import (
    DeploymentPlan,
    PlacementGroup,
    PlannedPerformance,
    PlannedPoint,
    PlannedService,
    write_plan,
)
from tests.integration.cli.conftest import ROOT, Spillway

WORKER = {"SPILLWAY_CHAT_MODEL": "sim-chat", "SPILLWAY_EMBED_MODEL": "none"}
FRONT = [
    PlannedPoint(0.05, 2.0, 1, 0.01, "prefix+decode:1"),
    PlannedPoint(0.1, 6.0, 2, 0.02, "prefix+decode:2"),
    PlannedPoint(0.4, 16.0, 2, 0.04, "prefix+decode:2"),
]
CHOSEN = FRONT[1]
ANSWERS = 3
PLACES = "(all) => all.map((e) => ['cx', 'cy'].map((name) => Number(e.getAttribute(name))))"


class Planned:
    """An instance that a plan started, whose generator is a sim device."""

    def __init__(self, spillway: Spillway, place: Path) -> None:
        plan = DeploymentPlan(
            machine=fingerprint(),
            services=[
                PlannedService("router"),
                PlannedService("gpu_worker", threads=1, device="sim", settings=WORKER),
                PlannedService("vector_search", threads=1),
                PlannedService("kv_store"),
            ],
            predicted=PlannedPerformance(CHOSEN.ttft_s, CHOSEN.qps, CHOSEN.tpot_s, CHOSEN.qps / CHOSEN.chips),
            schedule=[
                PlacementGroup(["prefix", "decode"], "core", 2, {"prefix": 1, "decode": 8}, "gpu_worker")
            ],
            front=FRONT,
        )  # fmt: skip
        place.write_bytes(write_plan(plan))
        self.url = spillway.up("--no-sample", "--plan", str(place))

    def answer(self) -> None:
        """Have one chat answered."""
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] > 1


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planned]:
    place = tmp_path_factory.mktemp("planned")
    spillway = Spillway(ROOT, place / "data")
    try:
        yield Planned(spillway, place / "plan.json")
        assert spillway.run("down").returncode == 0
    finally:
        spillway.clean_up()


def test_the_front_with_the_plan_and_where_it_runs(page: Page, planned: Planned) -> None:
    """Every schedule of the front is a point, the plan's is marked; answers put the mesh beside it."""
    page.goto(f"{planned.url}/#/mesh")
    panel = page.locator("section[aria-label=Plan]")
    expect(panel).to_be_visible()
    expect(panel.locator(".planned")).to_have_text(
        "Planned: first token after 100 ms, 6 requests/s on 2 cores, 20 ms between tokens; prefix+decode:2."
    )
    expect(panel.locator("circle.plot-point:not(.last)")).to_have_count(len(FRONT))
    expect(panel.locator("circle.front-planned")).to_have_count(1)
    expect(panel.locator("circle.front-now")).to_have_count(0)
    expect(panel.locator(".now")).to_have_text("Now: no answer yet.")
    assert panel.locator(".front-line").get_attribute("d").count("H") == len(FRONT) - 1  # type: ignore[union-attr]

    for _ in range(ANSWERS):
        planned.answer()
    expect(panel.locator("circle.front-now")).to_have_count(1)
    expect(panel.locator(".now")).to_have_text(
        re.compile(r"Now: first token after [\d.]+ .?s, [\d.e-]+ requests/s on 2 cores, .* between tokens \(medians")
    )  # fmt: skip

    panel.locator("summary").click()
    rows = panel.locator("tbody tr")
    expect(rows).to_have_count(len(FRONT))
    expect(panel.locator("th").nth(1)).to_have_text("Requests/s a core")
    expect(panel.locator("tr.is-planned")).to_have_count(1)
    assert rows.nth(1).locator("td").all_inner_texts() == [
        "100 ms", "3", "6", "20 ms", "2", "prefix+decode:2 (planned)",
    ]  # fmt: skip
    assert rows.nth(2).locator("td").first.inner_text() == "400 ms"


def test_the_points_lie_where_they_belong(page: Page, planned: Planned) -> None:
    """A later first token is further right, a higher rate further up; the plan's point is one of the front's."""
    page.goto(f"{planned.url}/#/mesh")
    points = page.locator("section[aria-label=Plan] circle.plot-point:not(.last)")
    expect(points).to_have_count(len(FRONT))
    places = points.evaluate_all(PLACES)
    across, down = zip(*places, strict=True)

    assert list(across) == sorted(across)
    assert list(down) == sorted(down, reverse=True)
    chosen = page.locator("circle.front-planned")
    assert [float(chosen.get_attribute(name) or "nan") for name in ("cx", "cy")] == places[1]
    assert "6 requests/s on 2 cores" in chosen.locator("title").text_content()  # type: ignore[operator]
