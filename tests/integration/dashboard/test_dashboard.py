"""The dashboard as its user meets it: a real browser, a real mesh, and what happens when a part of that is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.integration.dashboard.conftest import DOCUMENTS, HOSTILE, Instance
from tests.support.mesh import Process

SHIPPED = "spillway-demo"
SLOW_STEP_S = "0.1"
pytestmark = pytest.mark.timeout(600)
# Keeps every text that the state and the hints ever show.
WATCH = """() => {
  window.seen = new Set();
  const note = () => document.querySelectorAll("#state .words, .hint").forEach((e) => seen.add(e.textContent));
  new MutationObserver(note).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
# The parts of the Sessions page that are wider than what holds them.
OVERFLOWING = """() => [...document.querySelectorAll(".session-list, .session-list *, .transcript, .transcript *")]
  .filter((e) => e.getBoundingClientRect().right > e.closest(".beside > *").getBoundingClientRect().right + 1)
  .map((e) => e.className || e.tagName)"""
VIEWS = ("mesh", "chat", "search", "collections", "sessions", "timeline")


def open_view(page: Page, instance: Instance, view: str) -> None:
    page.goto(f"{instance.url}/#/{view}")
    expect(page.locator("#state .words")).to_have_text("live")


def bars(page: Page) -> list[float]:
    """Return how long the bars of hits are, in percent of the longest they can be."""
    widths = page.locator(".hit .bar-fill").evaluate_all("(all) => all.map((e) => e.style.width)")
    return [round(float(width.removesuffix("%")), 1) for width in widths]


def ask(page: Page, words: str) -> Any:
    """Send a message and return the locator of its answer, which may be on its way."""
    turns = page.locator("article.assistant")
    before = turns.count()
    page.fill("#chat-text", words)
    page.keyboard.press("Enter")
    answer = turns.nth(before)
    expect(answer).to_be_visible()
    return answer


def test_the_mesh_is_shown(page: Page, instance: Instance) -> None:
    """Every lane has its use, every worker its model, depth, cost and last batch; the window its latencies."""
    instance.post("/v1/embeddings", {"input": "water over the dam"})
    open_view(page, instance, "mesh")
    lanes = page.locator(".lane")
    expect(lanes).to_have_count(5)
    for name in (SHIPPED, "minilm", "Vector search"):
        expect(page.locator(".lane", has_text=name).first).to_contain_text("items")
    chat = page.locator("tr[data-service=gpu_worker]", has_text=SHIPPED)
    expect(chat).to_contain_text("ready")
    expect(chat).to_contain_text("a token")
    embed = page.locator("tr[data-service=gpu_worker]", has_text="minilm")
    expect(embed).to_contain_text("1 item, ")
    expect(page.get_by_label("Latencies")).to_contain_text("Embeddings")
    expect(page.get_by_label("Refusals")).to_contain_text("No request was refused.")
    expect(page.locator("section[aria-label=Plan]")).to_be_hidden()
    assert page.locator(".spark-line").first.get_attribute("d")


def test_never_two_looks_at_once(page: Page, instance: Instance) -> None:
    """The page looks again and again, and not before the last look has been answered."""
    under_way, most, done = 0, 0, 0

    def begun(request: Any) -> None:
        nonlocal under_way, most
        if request.url.endswith("/v1/mesh"):
            under_way += 1
            most = max(most, under_way)

    def ended(request: Any) -> None:
        nonlocal under_way, done
        if request.url.endswith("/v1/mesh"):
            under_way, done = under_way - 1, done + 1

    page.on("request", begun)
    page.on("requestfinished", ended)
    page.on("requestfailed", ended)
    open_view(page, instance, "mesh")
    page.wait_for_timeout(100)
    while done < 3:
        page.wait_for_timeout(100)

    assert most == 1


def test_a_search(page: Page, instance: Instance) -> None:
    """The nearest passage comes first with its score; what documents hold is text, whatever it looks like."""
    open_view(page, instance, "search")
    page.get_by_role("radio", name="notes").check()
    page.fill("#search-text", "What does the ship carry?")
    page.get_by_role("button", name="Search").click()
    first = page.locator(".hit").first
    expect(first).to_contain_text("boutune.md")
    expect(first).to_contain_text("mostly carries cement")
    scores = [float(text) for text in page.locator(".hit-score").all_inner_texts()]
    assert scores == sorted(scores, reverse=True)

    assert bars(page) == [round(100 * max(0.0, score), 1) for score in scores]

    page.fill("#search-text", "a hostile page of stars")
    page.keyboard.press("Enter")
    hit = page.locator(".hit", has_text="A hostile page")
    expect(hit).to_contain_text(HOSTILE)
    expect(hit).to_contain_text(DOCUMENTS[2]["id"])
    assert page.locator("main script, main img, main b").count() == 0
    assert page.evaluate("window.pwned") is None

    page.get_by_role("link", name="timeline", exact=True).click()
    expect(page.locator(".gantt-row")).to_have_count(3)


def test_a_search_by_words(page: Page, instance: Instance) -> None:
    """By words only passages that hold them are found, by both others, too; such scores have no bar."""
    open_view(page, instance, "search")
    page.get_by_role("radio", name="notes").check()
    page.select_option("#search-mode", "text")
    page.fill("#search-text", "cement")
    page.keyboard.press("Enter")
    expect(page.locator(".search [role=status]")).to_contain_text("1 hit by words")
    expect(page.locator(".hit")).to_have_count(1)
    expect(page.locator(".hit")).to_contain_text("mostly carries cement")
    assert bars(page) == []

    page.select_option("#search-mode", "hybrid")
    page.select_option("#search-diversity", "hits that differ")
    page.get_by_role("button", name="Search").click()
    expect(page.locator(".search [role=status]")).to_contain_text("3 hits by both")
    expect(page.locator(".hit").first).to_contain_text("boutune.md")
    page.fill("#search-text", "no such words")
    page.select_option("#search-mode", "text")
    page.keyboard.press("Enter")
    expect(page.locator(".search [role=status]")).to_contain_text("0 hits by words")


def test_a_grounded_chat_and_its_timeline(page: Page, instance: Instance) -> None:
    """An answer is streamed and cites passages; a session goes on, is read and deleted; the request has a timeline."""
    open_view(page, instance, "chat")
    page.select_option("#chat-collection", "notes")
    answer = ask(page, "What does the ship Boutune carry?")
    # What the small model reads in the passages is not the page's affair; that it cites one is.
    expect(answer.locator(".said")).to_contain_text("The cargo of Boutune is")
    opens_its_passages(answer)

    page.get_by_label("Rewrite follow-ups").check()
    second = ask(page, "Who is in command there?")
    expect(second.locator(".meta a")).to_be_visible()
    expect(second.locator(".passages")).to_contain_text("searched for: Who is in command there?")
    [session] = instance.get("/v1/sessions")["data"]
    assert session["turns"] == 2

    second.locator(".meta a").click()
    rows = page.locator(".gantt .gantt-row")
    expect(rows).to_have_count(4)
    for stage, service in (
        ("request", "router"),
        ("embed", "worker"),
        ("search", "vector_search"),
        ("generate", "gpu_worker"),
    ):
        expect(page.locator(f".gantt-row[data-stage={stage}]")).to_contain_text(service)
    expect(page.locator(".timeline table")).to_contain_text("first token")
    runs = page.locator(".stage-chart .gantt-row")
    shown = [row.get_attribute("data-run") for row in runs.all()]
    assert shown == ["embed", "search", "prompt", "generate"]
    expect(runs.first.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"from \d"))
    expect(page.locator(".stage-chart .meta")).to_contain_text("one after the other")
    request = page.input_value("#timeline-id")
    told = instance.spillway.run("explain", request, "--url", instance.url).stdout.splitlines()
    assert told[0].startswith(f"{request}: result, ")
    assert [line.split()[0] for line in told[1:]] == shown
    page.goto(f"{instance.url}/#/timeline")
    page.fill("#timeline-id", request)
    page.keyboard.press("Enter")
    expect(rows).to_have_count(4)

    page.goto(f"{instance.url}/#/sessions")
    page.get_by_role("button", name="What does the ship Boutune carry?").click()
    expect(page.locator(".transcript article")).to_have_count(4)
    opens_its_passages(page.locator(".transcript article.assistant").first)
    expect(page.locator(".tiers")).to_contain_text("held by")
    for tier, number in (("device", r"^[1-9]\d*$"), ("host", r"^\d+$"), ("redis", r"^[1-9]\d*$")):
        expect(page.locator(f".tier[data-tier={tier}] .number")).to_have_text(re.compile(number))
    page.get_by_role("link", name="Continue in the chat").click()
    expect(page.locator(".log article")).to_have_count(4)
    opens_its_passages(page.locator(".log article.assistant").first)
    page.go_back()
    page.get_by_role("button", name="What does the ship Boutune carry?").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete for good").click()
    expect(page.locator(".sessions [role=status]")).to_contain_text(
        "nothing of the session is left"
    )
    assert instance.get("/v1/sessions")["data"] == []


def opens_its_passages(answer: Locator) -> None:
    """A click on an answer's first citation opens the passage it names, with its document's text."""
    answer.locator(".cite").first.click()
    passage = answer.locator(".passage[open]")
    expect(passage).to_have_count(1)
    page_of = {d["id"]: d["text"].split("\n")[-1] for d in DOCUMENTS}
    shown = passage.inner_text()
    assert any(name in shown and text in shown for name, text in page_of.items())


def test_a_session_without_a_title(browser: Browser, instance: Instance) -> None:
    """Its id stands for its title; neither it nor a long title makes the page or the list wider than the screen."""
    untitled = instance.post("/v1/sessions", {})["id"]
    titled = instance.post("/v1/sessions", {"metadata": {"title": "Wasserfall" * 20}})["id"]
    for width in (360, 800, 1280):
        context = browser.new_context(viewport={"width": width, "height": 740})
        page = context.new_page()
        for session in (untitled, titled):
            page.goto(f"{instance.url}/#/sessions")
            page.locator(f"[data-session='{session}'] button").click()
            expect(page.locator(".transcript")).to_contain_text(session)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(OVERFLOWING) == []
        context.close()
    for session in (untitled, titled):
        instance.delete(f"/v1/sessions/{session}")


def test_a_chat_by_keyboard(page: Page, instance: Instance) -> None:
    """From the top of the page to an answer and its passage without a mouse; what has the focus is seen to."""
    page.emulate_media(color_scheme="dark")
    open_view(page, instance, "mesh")
    focused: Callable[[], str] = lambda: page.evaluate(  # noqa: E731
        "document.activeElement.id || document.activeElement.textContent"
    )
    names = []
    for _ in range(3):
        page.keyboard.press("Tab")
        names.append(focused())
    assert names == ["Skip to content", "Mesh", "Chat"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#chat-text")).to_be_focused()
    expect(page.locator("#chat-collection option[value=notes]")).to_be_attached()
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
    assert focused() == "chat-collection"
    page.keyboard.type("notes")
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.type("What is the chief export of Prutholm?")
    page.keyboard.press("Enter")
    answer = page.locator("article.assistant")
    expect(answer.locator(".said")).to_contain_text("The main export of Prutholm is")
    expect(answer.locator(".cite")).to_be_visible()
    expect(page.locator("#chat-text")).to_be_focused()
    while focused() != "[1]":
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(answer.locator(".passage[open] summary")).to_be_focused()
    assert page.locator("[role=log][aria-live=polite]").count() == 1


def test_narrow_and_dark(browser: Browser, instance: Instance) -> None:
    """On a screen 360 pixels wide nothing has to be scrolled sideways, in light and in dark."""
    papers = []
    for scheme in ("light", "dark"):
        context = browser.new_context(
            viewport={"width": 360, "height": 740},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page = context.new_page()
        for view in VIEWS:
            open_view(page, instance, view)
            if view == "mesh":
                expect(page.locator(".lane")).to_have_count(5)
            assert page.evaluate("document.documentElement.scrollWidth") == 360, view
        papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()

    assert papers[0] != papers[1]


# What the page says where there is nothing.
CLAIMS = re.compile(
    r"no encoder|no request|no job|no session is kept|no collection|not known|idle",
    re.IGNORECASE,
)


def test_a_late_list_does_not_replace_a_newer_one(page: Page, instance: Instance) -> None:
    """The page shows the state of its latest question, in whatever order the router's answers arrive."""
    held: list[Route] = []
    page.route("**/v1/sessions?*", lambda route: held.append(route))  # noqa: PLW0108 - Playwright marks its handlers
    open_view(page, instance, "sessions")
    page.evaluate("dispatchEvent(new HashChangeEvent('hashchange'))")
    while len(held) < 2:
        page.evaluate("null")  # lets the browser's requests be seen
    refusal = {"error": {"message": "no API key", "code": "missing_api_key"}}
    held[1].fulfill(status=401, json=refusal)
    expect(page.locator(".sessions [role=alert]")).to_contain_text("A key is needed")
    with page.expect_response(lambda response: response.ok and "/v1/sessions?" in response.url):
        held[0].fulfill(json={"object": "list", "data": [], "has_more": False, "next": None})
    page.evaluate("fetch('/').then((response) => response.text())")  # after the late answer

    expect(page.locator(".sessions [role=alert]")).to_contain_text("A key is needed")
    expect(page.locator(".sessions")).not_to_contain_text(CLAIMS, use_inner_text=True)


def test_without_a_key_nothing_is_claimed(page: Page, instance: Instance, keyed: str) -> None:
    """Without a key, and with a wrong one, each view says that one is needed and none that there is nothing."""
    instance.post("/v1/sessions", {"metadata": {"title": "unseen"}})
    page.goto(keyed)
    for view in ("mesh", "chat", "search", "collections", "sessions"):
        page.goto(f"{keyed}/#/{view}")
        page.get_by_role("button", name="Not now").or_(page.locator("#main .view")).last.wait_for()
        if page.get_by_role("dialog").is_visible():
            page.get_by_role("button", name="Not now").click()
        told = page.locator("#main [role=alert]:visible, #main [role=status]:visible")
        expect(told).to_contain_text("A key is needed")
        expect(page.locator("#main")).not_to_contain_text(CLAIMS, use_inner_text=True)
        assert page.locator("#main .panel:visible, #main .hit, #main .session-list li").count() == 0
    key_is(page, "sk-sw-wrong")
    for view in ("mesh", "chat", "search", "collections", "sessions"):
        page.goto(f"{keyed}/#/{view}")
        if page.get_by_role("dialog").is_visible():
            page.get_by_role("button", name="Not now").click()
        told = page.locator("#main [role=alert]:visible, #main [role=status]:visible")
        expect(told).to_contain_text("The router refused this key")
        expect(page.locator("#main")).not_to_contain_text(CLAIMS, use_inner_text=True)
    created = instance.spillway.run("keys", "create", "--tenant", "fresh")
    page.goto(f"{keyed}/#/sessions")
    key_is(page, next(word for word in created.stdout.split() if word.startswith("sk-sw-")))
    expect(page.locator(".sessions")).to_contain_text("No session is kept")
    page.evaluate("sessionStorage.clear()")
    page.goto(f"{keyed}/#/chat")
    page.goto(f"{keyed}/#/sessions")
    expect(page.locator(".sessions [role=alert]")).to_contain_text("A key is needed")
    expect(page.locator(".sessions")).not_to_contain_text(CLAIMS, use_inner_text=True)


def key_is(page: Page, secret: str) -> None:
    """Enter a key by the page's button."""
    if not page.get_by_role("dialog").is_visible():
        page.locator("#change-key").click()
    page.fill("#key-text", secret)
    page.get_by_role("button", name="Use this key").click()


def test_keys_on(page: Page, instance: Instance, keyed: str) -> None:
    """The page asks for a key, says that one is wrong, and keeps the right one in this tab only."""
    page.goto(keyed)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("This router answers only requests with a key.")
    page.fill("#key-text", "sk-sw-wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The router refused this key")
    created = instance.spillway.run("keys", "create", "--tenant", "acme")
    secret = next(word for word in created.stdout.split() if word.startswith("sk-sw-"))
    page.fill("#key-text", secret)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#state .words")).to_have_text("live")
    page.goto(f"{keyed}/#/search")
    expect(page.locator(".search .error")).to_contain_text("There is no collection yet")
    page.reload()
    expect(page.locator("#state .words")).to_have_text("live")

    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [
        0,
        "",
        1,
    ]
    other = page.context.new_page()
    other.goto(keyed)
    expect(other.get_by_role("dialog")).to_be_visible()


@pytest.fixture
def slow(instance: Instance) -> Process:
    """A worker beside the supervised ones, whose model, `sim-chat`, takes its time for each token."""
    flags = ("--embed-model", "none", "--chat-model", "sim", "--threads", "1")
    return instance.beside("gpu_worker", "slow", "--device", "sim", "--beta", SLOW_STEP_S, *flags)


def test_what_is_killed_comes_back(page: Page, instance: Instance, slow: Process) -> None:
    """A killed router: the page says so, and the answer goes on where it broke off. A killed worker: lost, and back."""
    open_view(page, instance, "mesh")
    rows = page.locator("tr", has_text="sim-chat")
    expect(rows.filter(has_text="ready")).to_have_count(1)
    open_view(page, instance, "chat")
    page.select_option("#chat-collection", "")
    page.select_option("#chat-model", "sim-chat")
    answer = ask(page, "water over the dam")
    said = answer.locator(".said")
    expect(said).not_to_be_empty()
    page.evaluate(WATCH)  # the router may be back before the next look from outside
    os.kill(instance.spillway.pids()["router-0"], signal.SIGKILL)
    page.wait_for_function("() => seen.has('router away')")
    page.wait_for_function(
        "() => [...seen].some((words) => words.includes('waiting for the router'))"
    )
    broken = said.inner_text()
    page.wait_for_function(
        "([before]) => document.querySelector('.assistant .said').textContent.length > before + 20",
        arg=[len(broken)],
    )
    expect(page.locator("#state .words")).to_have_text("live")
    page.get_by_role("button", name="Stop").click()
    expect(answer.locator(".meta")).to_contain_text("resumed after 1 break")
    whole = said.inner_text()
    request = answer.locator(".meta a").get_attribute("href").rsplit("/", 1)[1]
    assert whole.startswith(broken)
    assert instance.content(request).startswith(whole)

    open_view(page, instance, "mesh")
    assert slow.kill() == -signal.SIGKILL
    expect(rows.filter(has_text="lost")).to_have_count(1)
    expect(page.locator(".lane", has_text="sim-chat")).to_contain_text("no worker")
    slow.start()
    expect(rows.filter(has_text="ready")).to_have_count(1)
    expect(page.locator(".lane", has_text="sim-chat")).not_to_contain_text("no worker")
