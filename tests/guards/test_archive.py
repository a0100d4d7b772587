"""A data directory that an earlier tree made, and SIGKILL cut off, opens with all that is in it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guards import archive, plain
from tests.guards.checkout import Checkout, Instance
from tests.guards.script import Script
from tests.support.waiting import until_sync

MADE: dict[str, Any] = json.loads(archive.LIST.read_text(encoding="utf-8"))
KEYS: dict[str, str] = MADE["keys"]
# Who has noted its process when a start is cut off; "" is at once.
MOMENTS = ("", "redis-0", "vector_search-0", "kv_store-0", "router-0")


def unpacked(folder: Path) -> Instance:
    """Return an instance on a copy of the archived directory."""
    with tarfile.open(archive.ARCHIVE) as packed:
        packed.extractall(folder, filter="data")
    settings = {**archive.SETTINGS, "SPILLWAY_API_KEY": KEYS["alpha"]}
    return Instance(Checkout(), folder, **settings)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """The archived directory, opened by this tree."""
    folder = tmp_path_factory.mktemp("archive")
    instance = unpacked(folder)
    try:
        yield instance.start()
    finally:
        instance.kill()
        shutil.rmtree(folder, ignore_errors=True)


def script_of(instance: Instance, tenant: str = "alpha") -> Script:
    return Script(instance.url, KEYS[tenant])


def check_keys(instance: Instance) -> None:
    """A key authenticates, a revoked one does not, and a quota holds."""
    assert json.loads(instance.said("keys", "list", "--json")) == MADE["listed"]
    assert script_of(instance).ask("GET", "/v1/models").status == 200
    assert script_of(instance, "gone").ask("GET", "/v1/models").status == 401
    body = {"input": "word", "dimensions": 2}
    asked = [script_of(instance, "beta").ask("POST", archive.EMBED, body) for _ in range(3)]
    assert [reply.status for reply in asked] == [200, 200, 429]
    assert asked[2].json["error"]["code"] == "quota"


def check_collections(instance: Instance) -> None:
    """The same collections and hits; a write that was under way is applied, a removed one stays away."""
    script = script_of(instance)
    listed = script.ask("GET", "/v1/collections").json["data"]
    assert sorted(listed, key=lambda each: str(each["name"])) == MADE["collections"]
    at = {"vector": [9, 1, 0], "k": 1}
    until_sync(
        lambda: archive.search(script, "points", at)[0]["id"] == MADE["late"], "the late write"
    )
    hits = {
        text: archive.search(script, "texts", {"text": text, "k": 1}) for text in archive.QUESTIONS
    }
    assert list(plain.differences(MADE["hits"], hits)) == []
    near = archive.search(script, "points", archive.NEAREST)
    assert list(plain.differences(MADE["nearest"], near)) == []
    assert script.ask("GET", "/v1/collections/texts/documents/gone").status == 404
    assert script.ask("GET", "/v1/collections/removed").status == 404


def check_documents(instance: Instance) -> None:
    """Documents have their texts and metadata, and storing them again changes nothing."""
    script = script_of(instance)
    for number, (name, text) in enumerate(archive.TEXTS.items()):
        found = script.ask("GET", f"/v1/collections/texts/documents/{name}").json
        metadata = {"n": number, "deep": {"name": name}}
        assert (found["text"], found["metadata"]) == (text, metadata)
        body = {"documents": [{"id": name, "text": text, "metadata": metadata}]}
        again = script.ask("POST", "/v1/collections/texts/documents", body).json
        assert [each["status"] for each in again["data"]] == ["unchanged"]
    assert archive.TEXTS["bread"] in instance.said("search", "texts", "How do I make a loaf?")


def check_sessions(instance: Instance) -> None:
    """Sessions have their messages, tokens and pins."""
    script = script_of(instance)
    for name, was in MADE["sessions"].items():
        found = archive.told(script, was["session"]["id"])
        assert found["session"] == was["session"], name
        assert found["document"] == was["document"], name
    assert archive.OPENING.strip() in instance.said("sessions", "show", _talk()["id"])


def check_pages(instance: Instance) -> None:
    """Pages on disk are counted and can be read."""
    script, was = script_of(instance), MADE["sessions"]["talk"]
    here = f"/v1/sessions/{_talk()['id']}"
    assert was["disk"] > 0
    tiers = script.ask("GET", f"{here}/pages").json["tiers"]
    assert tiers["disk"] + tiers["redis"] >= was["disk"]
    head, _, pages = script.ask("GET", f"{here}/export/pages").body.partition(b"\n")
    assert json.loads(head)["pages"] >= was["disk"]
    assert len(pages) > was["disk"] * 100_000


def check_queued(instance: Instance) -> None:
    """Jobs that nobody had begun have expired, by now perhaps without a trace, and take no room."""
    script = script_of(instance)
    for request in MADE["queued"]:

        def state(request: str = request) -> Any:
            return script.ask("GET", f"/v1/requests/{request}").json.get("state")

        until_sync(lambda: state() not in {"queued", "running"}, f"{request} has ended")
        assert state() in {"expired", None}

    def held() -> int:
        lanes = script.ask("GET", "/v1/mesh").json["lanes"]
        return sum(lane["items"]["used"] for lane in lanes)

    until_sync(lambda: held() == 0, "nothing is held")


def check_turn(instance: Instance) -> None:
    """A session goes on with its history."""
    script, was = script_of(instance), _talk()
    answer = archive.turn(script, was["id"], "And now?")
    assert answer["session"] == {"id": was["id"], "version": was["version"] + 1}
    assert answer["usage"]["prompt_tokens"] > was["tokens"]
    found = archive.told(script, was["id"])["session"]
    assert found["messages"][: len(was["messages"])] == was["messages"]
    assert len(found["messages"]) == len(was["messages"]) + 2


def check_dead_letter(instance: Instance) -> None:
    """A dead letter is listed as it was, and its job can be tried again."""
    letter = MADE["dead_letter"]
    assert archive.dead(instance) == [letter]
    assert "result" in instance.said("dead-letters", "replay", letter["job"])
    assert archive.dead(instance) == []


def check_new(instance: Instance) -> None:
    """New documents and sessions can be stored beside the old ones."""
    script = script_of(instance)
    document = {"id": "new", "text": "Glaciers are rivers of ice."}
    body = {"documents": [document]}
    assert script.ask("POST", "/v1/collections/texts/documents", body).status == 200
    assert archive.search(script, "texts", {"text": "ice", "k": 1})[0]["id"] == "new"
    fresh = script.ask("POST", "/v1/sessions", {}).json["id"]
    assert archive.turn(script, fresh, "Hello")["session"]["version"] == 1


def _talk() -> dict[str, Any]:
    found: dict[str, Any] = MADE["sessions"]["talk"]["session"]
    return found


CHECKS: tuple[Callable[[Instance], None], ...] = (
    check_keys, check_collections, check_documents, check_sessions, check_pages, check_queued,
    check_turn, check_dead_letter, check_new,
)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_an_earlier_directory_opens(opened: Instance, check: Callable[[Instance], None]) -> None:
    """What an earlier tree stored is found and can be worked with."""
    check(opened)


def _cut_off(instance: Instance, moment: str) -> None:
    """Start an instance, and kill all of it as soon as a process has noted itself."""
    shutil.rmtree(instance.data_dir / "run", ignore_errors=True)
    begun = instance.begin()
    try:
        path = instance.data_dir / "run" / f"{moment}.json"
        until_sync(
            lambda: not moment or path.exists() or begun.poll() is not None, f"{moment} runs"
        )
        assert begun.poll() is None, instance.logs()
    finally:
        _kill(begun)
        instance.kill()


def _kill(begun: subprocess.Popen[bytes]) -> None:
    if begun.poll() is None:
        begun.send_signal(signal.SIGKILL)
    begun.wait(timeout=60)


@pytest.mark.timeout(600)
def test_a_start_that_is_cut_off_loses_nothing(tmp_path: Path) -> None:
    """SIGKILL of everything at several moments of a start, one after the other; then all is found."""
    instance = unpacked(tmp_path / "data")
    for moment in MOMENTS:
        _cut_off(instance, moment)
    try:
        instance.start()
        for check in CHECKS:
            check(instance)
    finally:
        instance.kill()
