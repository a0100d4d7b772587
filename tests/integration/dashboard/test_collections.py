"""The page Collections in a real browser, against a real mesh: figures, the map, its hits, and what goes away."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.integration.dashboard.conftest import HOSTILE
from tests.support.mesh import Mesh

pytestmark = pytest.mark.timeout(600)
DIMENSION = 16
CLUSTERS = 3
STORED = 240
# Pixels of the map that are not its background.
INKED = """() => {
  const canvas = document.querySelector(".map-area canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, i) => i % 4 === 3 && value > 0).length;
}"""


class Collections:
    """A mesh with collections, and its API."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.url = mesh, mesh.url

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return its answer's JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def make(self, name: str, documents: list[dict[str, Any]], **fields: Any) -> None:
        """Create a collection and store documents in it."""
        self.call("POST", "/v1/collections", {"name": name, **fields})
        if documents:
            path = f"/v1/collections/{name}/documents"
            self.call("POST", path, {"documents": documents})

    def open(self, page: Page, name: str = "") -> None:
        """Open the page, with a collection chosen."""
        page.goto(f"{self.url}/#/collections/{name}")
        expect(page.locator("#state .words")).to_have_text("live")


def clustered() -> list[dict[str, Any]]:
    rng = np.random.default_rng(8)
    centres = 3 * rng.standard_normal((CLUSTERS, DIMENSION))
    return [
        {
            "id": f"{i % CLUSTERS}/doc {i} ☃",
            "vector": (centres[i % CLUSTERS] + rng.standard_normal(DIMENSION)).tolist(),
            "metadata": {"title": f"Number {i}"},
        }
        for i in range(STORED)
    ]


@pytest.fixture(scope="module")
def made() -> Iterator[Collections]:
    """A mesh with a collection of texts, one of vectors, and an empty one."""
    mesh = Mesh()
    try:
        found = Collections(mesh)
        texts = [
            {
                "id": f"t{i}",
                "text": f"note {i} of ships and rivers",
                "metadata": {"title": f"T {i}"},
            }
            for i in range(12)
        ]
        texts.append({"id": '<img src=x onerror="window.pwned = 3">', "text": HOSTILE})
        texts[0]["metadata"] = {"title": HOSTILE}
        found.make("notes", texts)
        found.make("vectors", clustered(), model=None, dimension=DIMENSION, metric="l2")
        found.make("empty", [])
        yield found
    finally:
        mesh.close()


def test_all_collections_are_listed(page: Page, made: Collections) -> None:
    """Each with what it holds and how it is searched; a click opens one, and a link leads there, too."""
    made.open(page)
    rows = page.locator("tr[data-collection]")
    expect(rows).to_have_count(3)
    vectors = page.locator("tr[data-collection=vectors]")
    expect(vectors.locator("td").nth(1)).to_have_text(str(STORED))
    expect(vectors).to_contain_text("vectors only")
    expect(vectors).to_contain_text(f"{DIMENSION}, l2")
    expect(page.locator("tr[data-collection=notes]")).to_contain_text("exact")
    expect(page.locator(".collection-detail")).to_be_hidden()

    page.get_by_role("link", name="notes").click()
    expect(page.locator(".collection-detail h2").first).to_have_text("notes")
    expect(page.get_by_role("link", name="notes")).to_have_attribute("aria-current", "true")
    expect(page.locator(".collection-detail")).to_be_focused()
    expect(page.locator(".figure", has_text="Chunks")).to_contain_text("13 documents")
    expect(page.get_by_label("How it is searched")).to_contain_text("exact. 13 live vectors")
    expect(page.locator(".efforts tr[data-row=exact]")).to_contain_text("1.000")


def test_what_this_router_does_not_know_is_not_shown(page: Page, made: Collections) -> None:
    """Without a route for shards there is no section of shards, rather than an empty one."""
    page.route("**/v1/collections/*/shards", _no_route)
    page.route("**/v1/collections/*/explain", _no_route)
    made.open(page, "vectors")
    expect(page.locator(".map-area")).to_have_attribute("data-points", str(STORED))
    expect(page.get_by_label("Shards and replicas")).to_be_hidden()
    expect(page.locator(".efforts")).to_be_hidden()


def _no_route(route: Any) -> None:
    error = {
        "error": {"message": "no route", "type": "t", "param": None, "code": "route_not_found"}
    }
    route.fulfill(status=404, json=error)


def test_shards_and_efforts_are_shown_where_known(page: Page, made: Collections) -> None:
    """Ranges, replicas with their states, what is not served; why an index is of its kind, and its efforts."""
    half = 1 << 31
    serving = {"name": "search-a", "state": "serving", "alive": True, "why": ""}
    dead = {"name": "search-b", "state": "serving", "alive": False, "why": "no heartbeat"}
    shards = [
        {"shard": 1, "low": 0, "high": half, "rows": 90, "bytes": 5000, "served": True, "split": None,
         "replicas": [serving, {**serving, "name": "search-c", "state": "filling"}]},
        {"shard": 2, "low": half, "high": 2 * half, "rows": None, "bytes": None, "served": False,
         "split": None, "replicas": [dead]},
    ]  # fmt: skip
    efforts = [
        {"effort": 32, "recall": 0.97, "path": "graph", "predicted_ms": 0.4},
        {"effort": "exact", "recall": None, "path": "exact", "predicted_ms": None},
    ]
    explained = [{"shard": 1, "kind": "graph", "why": "Many rows.", "efforts": efforts}]
    page.route("**/collections/vectors/shards", lambda r: r.fulfill(json={"data": shards}))
    page.route("**/collections/vectors/explain", lambda r: r.fulfill(json={"shards": explained}))
    made.open(page, "vectors")
    first, second = (page.locator(f".collection-detail tr[data-row='{n}']") for n in (1, 2))
    expect(first).to_contain_text("50 % of them")
    expect(first).to_contain_text("search-c filling")
    expect(second).to_contain_text("not served")
    expect(second).to_contain_text("no heartbeat")
    expect(page.get_by_label("How it is searched")).to_contain_text("graph. Many rows.")
    expect(page.locator(".efforts tr[data-row='32']")).to_contain_text("0.970")


def test_a_tuning_is_shown_with_the_front_that_it_explored(page: Page, made: Collections) -> None:
    """Its goal, state, plan and notes; a point a setting, the chosen one marked; without a tuning there is nothing."""
    made.open(page, "vectors")
    expect(page.locator(".map-area")).to_have_attribute("data-points", str(STORED))
    expect(page.get_by_label("Tuning", exact=True)).to_be_hidden()

    def setting(kind: str, recall: float, qps: float, **more: int) -> dict[str, Any]:
        parts = {"lists": 0, "links": 0, "effort": 0, "depth": 0, "threads": 1, "code_bits": 8}
        parts |= {"rotate": True, **more}
        told = {"setting": {"kind": kind, **parts}, "recall": recall, "sure": recall, "qps": qps}
        return {**told, "p99_s": 0.001, "bytes": 1000, "why": ""}

    front = [
        setting("ivfpq", 0.91, 9000, lists=256, effort=4, depth=8),
        setting("graph", 0.97, 5000, links=16, effort=40),
        setting("exact", 1.0, 200),
    ]
    tuning = {
        "state": "done", "goal": {"recall": 0.95, "p99_s": 0.005, "memory_bytes": None}, "steps": [], "front": front,
        "notes": [HOSTILE], "explored": 300, "chosen": front[1], "why": "",
        "measured": {"recall": 0.968, "queries": 250, "qps": 4800},
    }  # fmt: skip
    page.route("**/collections/vectors/tune", lambda r: r.fulfill(json=tuning))
    page.reload()
    shown = page.get_by_label("Tuning", exact=True)
    expect(shown).to_contain_text("Goal: recall 0.95, p99 5 ms")
    expect(shown).to_contain_text("graph, M 16, ef 40, predicted 5,000 searches/s")
    expect(shown).to_contain_text("recall 0.968 by 250 queries")
    expect(shown).to_contain_text(HOSTILE)
    expect(shown.locator("circle")).to_have_count(3)
    expect(shown.locator("circle.last title")).to_contain_text("M 16")


def test_a_search_lights_its_hits(page: Page, made: Collections) -> None:
    """Text finds passages, which are listed with scores and lit up; what documents hold is text, however it looks."""
    made.open(page, "notes")
    area = page.locator(".map-area")
    expect(area).to_have_attribute("data-points", "13")
    expect(page.locator(".map-caption")).to_contain_text("13 chunks of 13")
    before = page.evaluate(INKED)
    assert before > 0

    page.get_by_label("Search for").fill("ships and rivers")
    page.keyboard.press("Enter")
    hits = page.locator(".collection-detail .hit")
    expect(hits).to_have_count(5)
    expect(area).to_have_attribute("data-lit", "5")
    expect(page.locator(".map-panel .meta")).to_contain_text("5 hits for ships and rivers")
    scores = [float(text) for text in hits.locator(".hit-score").all_inner_texts()]
    assert scores == sorted(scores, reverse=True)
    page.wait_for_function(f"({INKED})() > {before}")

    page.select_option("#map-k", "20")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(hits).to_have_count(13)
    expect(area).to_have_attribute("data-lit", "13")
    expect(page.locator(".hit", has_text="onerror").first).to_be_visible()
    assert page.locator("main script, main img, main b").count() == 0
    assert page.evaluate("window.pwned") is None
    page.get_by_role("button", name="Show hit 3").click()

    page.get_by_role("button", name="Clear").click()
    expect(hits).to_have_count(0)
    expect(area).to_have_attribute("data-lit", "0")


def test_the_lists_that_a_search_read_are_named(page: Page, made: Collections) -> None:
    """By number, nearest first; of many lists the first, and how many more."""
    made.open(page, "notes")
    scanned: list[int] = []

    def named(route: Route) -> None:
        asked: Any = route.request.post_data_json
        assert asked["include_lists"] is True
        found = route.fetch().json()
        assert "scanned" not in found["search"]  # it compares all chunks
        route.fulfill(json={**found, "search": {**found["search"], "scanned": [scanned]}})

    page.route("**/collections/notes/search", named)
    for lists, told in (
        ([7, 31, 2], "3 lists read, nearest first: 7, 31, 2"),
        ([*range(30)], "22, 23 and 6 more"),
    ):
        scanned[:] = lists
        page.get_by_label("Search for").fill("ships and rivers")
        page.keyboard.press("Enter")
        expect(page.locator(".map-panel .meta")).to_contain_text(told)


def test_vectors_are_searched_by_a_document(page: Page, made: Collections) -> None:
    """Where no text can be searched for, a document's id, or a click on a point, finds what is nearest to it."""
    made.open(page, "vectors")
    area = page.locator(".map-area")
    expect(area).to_have_attribute("data-points", str(STORED))
    page.get_by_label("Id of a document").fill("1/doc 4 ☃")
    page.keyboard.press("Enter")
    hits = page.locator(".collection-detail .hit")
    expect(hits.first).to_contain_text("Number 4")
    expect(area).to_have_attribute("data-lit", "5")
    ids = hits.locator(".hit-head .mono").all_inner_texts()
    assert {name[0] for name in ids} == {"1"}

    page.get_by_label("Id of a document").fill("nowhere")
    page.keyboard.press("Enter")
    expect(page.locator(".map-panel .error")).to_contain_text("holds no document 'nowhere'")
    expect(hits).to_have_count(0)

    page.get_by_label("Id of a document").fill("2/doc 8 ☃")
    page.keyboard.press("Enter")
    expect(hits.first).to_contain_text("Number 8")
    title = hits.nth(1).locator("strong").inner_text()
    expect(area).to_have_attribute("data-lit", "5")
    page.get_by_role("button", name="Show hit 2").click()  # it is in the middle of the map now
    page.locator(".map-area canvas").hover()
    expect(page.locator(".map-tip strong")).to_have_text(title)
    page.locator(".map-area canvas").click()
    expect(hits.first).to_contain_text(title)
    expect(page.locator(".map-panel .meta")).to_contain_text(f"nearest to {title}")


def test_the_map_by_keyboard(page: Page, made: Collections) -> None:
    """The map has a name and the focus; keys and buttons zoom and move it, and show all of it again."""
    made.open(page, "vectors")
    area = page.get_by_role("group", name="Map. Arrow keys move it")
    expect(area).to_have_attribute("data-points", str(STORED))
    picture = page.get_by_role("img", name=f"Map of vectors: {STORED} chunks of {STORED}")
    expect(picture).to_be_visible()
    area.focus()
    page.keyboard.press("+")
    expect(area).to_have_attribute("data-zoom", "1.50")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("-")
    page.keyboard.press("-")
    expect(area).to_have_attribute("data-zoom", "0.67")
    page.keyboard.press("0")
    expect(area).to_have_attribute("data-zoom", "1.00")
    page.get_by_role("button", name="Zoom in").click()
    expect(area).to_have_attribute("data-zoom", "1.50")
    page.get_by_role("button", name="Whole map").click()
    expect(area).to_have_attribute("data-zoom", "1.00")
    page.mouse.wheel(0, 200)  # nobody is on the map: the page scrolls
    area.focus()
    page.locator(".map-area canvas").hover()
    page.mouse.wheel(0, -120)
    expect(area).to_have_attribute("data-zoom", "1.50")


def test_writes_reach_the_map(page: Page, made: Collections) -> None:
    """An empty collection says so; what is stored meanwhile appears, and so does what was changed since."""
    made.make("grows", [], model=None, dimension=DIMENSION)
    made.open(page, "grows")
    caption = page.locator(".map-caption")
    expect(caption).to_have_text("This collection is empty")
    documents = clustered()
    path = "/v1/collections/grows/documents"
    made.call("POST", path, {"documents": documents[:100]})
    expect(page.locator(".map-area")).to_have_attribute("data-points", "100")
    made.call("POST", path, {"documents": documents[100:]})
    expect(page.locator(".map-area")).to_have_attribute("data-points", str(STORED))
    made.call("DELETE", "/v1/collections/grows")


def test_a_collection_that_is_deleted_while_watched(page: Page, made: Collections) -> None:
    """The page says so, and shows neither the collection nor its map any longer; one that never was is not found."""
    made.make("goes", clustered()[:30], model=None, dimension=DIMENSION)
    made.open(page, "goes")
    expect(page.locator(".map-area")).to_have_attribute("data-points", "30")
    made.call("DELETE", "/v1/collections/goes")
    expect(page.locator(".collections-view [role=alert]").first).to_have_text(
        "Collection goes was deleted."
    )
    expect(page.locator(".collection-detail")).to_be_hidden()
    expect(page.locator("tr[data-collection=goes]")).to_have_count(0)

    page.goto(f"{made.url}/#/collections/{'n' * 70}%20%E2%98%83")
    expect(page.locator(".collections-view [role=alert]").first).to_contain_text("no collection")
    page.get_by_role("link", name="notes").click()
    expect(page.locator(".collections-view [role=alert]").first).to_be_hidden()
    expect(page.locator(".collection-detail")).to_be_visible()


def test_narrow_screens(browser: Browser, made: Collections) -> None:
    """A collection with its map and hits needs no scrolling sideways on 360 pixels."""
    context = browser.new_context(viewport={"width": 360, "height": 740})
    page = context.new_page()
    made.open(page, "notes")
    expect(page.locator(".map-area")).to_have_attribute("data-points", "13")
    page.get_by_label("Search for").fill("rivers")
    page.keyboard.press("Enter")
    expect(page.locator(".map-area")).to_have_attribute("data-lit", "5")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    context.close()
