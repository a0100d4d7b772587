"""A run brings the collection to the source's state, whatever the server does in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from spillway_client import AsyncSpillway

from cli import main, upload
from cli.files import Found, Item, Problem, Skipped
from cli.upload import Counts, Stop, Upload
from common.wire.search import document_hash
from tests.support import documents


@dataclass
class Store:
    """A server of documents that fails as a test says: `faults` are statuses (0: cut) of the next writes."""

    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[int] = field(default_factory=list)
    poison: str = ""
    batches: list[list[str]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    answer_lost: bool = False
    url: str = ""

    async def write(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers["Idempotency-Key"])
        fault = self.faults.pop(0) if self.faults else 200
        body = json.loads(await request.read())["documents"]
        if fault == 0 and self.answer_lost:
            self._keep(body)
        if fault == 0:
            assert request.transport is not None
            request.transport.abort()
        if fault != 200:
            error = {"message": "no", "code": "job_failed" if fault == 599 else "x"}
            status = 500 if fault == 599 else fault or 500
            return web.json_response(
                {"error": error}, status=status, headers={"retry-after-ms": "1"}
            )
        if self.poison and any(self.poison in item["text"] for item in body):
            return web.json_response({"error": {"message": "poison", "code": "bad"}}, status=422)
        return web.json_response({"data": self._keep(body), "applied": "1-0"})

    def _keep(self, body: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.batches.append([item["id"] for item in body])
        done = []
        for item in body:
            digest = document_hash(text=item["text"], metadata=item["metadata"])
            same = self.documents.get(item["id"], {}).get("hash") == digest
            self.documents[item["id"]] = {**item, "hash": digest}
            done.append(
                {"id": item["id"], "status": "unchanged" if same else "stored", "chunks": 1}
            )
        return done

    async def list(self, request: web.Request) -> web.Response:
        source = json.loads(request.query["filter"])["source"]
        limit = min(int(request.query["limit"]), 3)
        rest = [
            id_
            for id_, item in sorted(self.documents.items())
            if item["metadata"]["source"] == source and id_ > request.query.get("after", "")
        ]
        data = [{"id": id_, "hash": self.documents[id_]["hash"]} for id_ in rest[:limit]]
        more = len(rest) > limit
        return web.json_response(
            {"data": data, "has_more": more, "next": rest[limit - 1] if more else None}
        )

    async def collection(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"id": "c", "name": "c", "dimension": 3, "metric": "cosine", "model": "m", "created": 0}
        )

    async def delete(self, request: web.Request) -> web.Response:
        ids = json.loads(await request.read())["ids"]
        for id_ in ids:
            self.documents.pop(id_, None)
        return web.json_response({"deleted": len(ids)})


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    state = Store()
    app = web.Application()
    base = "/v1/collections/c/documents"
    app.add_routes(
        [
            web.get("/v1/collections/c", state.collection),
            web.post(base, state.write),
            web.get(base, state.list),
            web.post(f"{base}/delete", state.delete),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    state.url = "http://{}:{}".format(*runner.addresses[0][:2])
    yield state
    await runner.cleanup()


def item(name: str, text: str = "text", source: str = "s") -> Item:
    return Item(name, text, {"source": source})


async def run(store: Store, found: Iterable[Found], **options: Any) -> Counts:
    counts, prune = Counts(), options.pop("prune", None)
    async with AsyncSpillway(store.url, max_retries=0) as client:
        made = Upload(
            client, "c", "s", counts=counts, notice=lambda *_: None, patience_s=5.0, **options
        )
        await made.run(iter(found), prune=prune)
    return counts


async def test_second_run_skips(store: Store) -> None:
    """What is stored and unchanged is not sent again; what changed replaces the old."""
    await run(store, [item(f"d{n}") for n in range(40)])
    store.batches.clear()
    counts = await run(store, [item(f"d{n}", "new" if n == 7 else "text") for n in range(40)])

    assert (counts.stored, counts.unchanged) == (1, 39)
    assert store.batches == [["d7"]]
    assert store.documents["d7"]["text"] == "new"


async def test_prune(store: Store) -> None:
    """Pruning removes what is gone, of this source only, and neither filtered nor unreadable files' documents."""
    await run(store, [item(f"d{n}") for n in range(5)] + [item("shut/x"), item("keep.txt")])
    await run(store, [item("other", source="elsewhere")])
    found: list[Found] = [
        item("d0"),
        Problem("d1", "not UTF-8"),
        Skipped("d2", "empty"),
        Problem("shut", "denied", folder=True),
    ]
    counts = await run(store, found, prune=lambda id_: not id_.endswith(".txt"))

    assert sorted(store.documents) == ["d0", "d1", "keep.txt", "other", "shut/x"]
    assert (counts.removed, len(counts.failed), counts.skipped) == (3, 2, [Skipped("d2", "empty")])


async def test_parts_that_are_no_more(store: Store) -> None:
    """A document of fewer parts than before loses the others; one that cannot be read now keeps them all."""
    names = ["a.pdf", "a.pdf#2", "a.pdf#3", "b.pdf", "b.pdf#2", "c#1"]
    await run(store, [item(name) for name in names])
    left = [item("a.pdf"), item("a.pdf#2"), item("c#1")]
    counts = await run(store, [*left, Problem("b.pdf", "damaged")])
    kept = ["a.pdf", "a.pdf#2", "b.pdf", "b.pdf#2", "c#1"]

    assert sorted(store.documents) == kept
    assert counts.removed == 1
    await run(store, [*left, Problem("b.pdf", "damaged")], prune=lambda _: True)
    assert sorted(store.documents) == kept


async def test_prune_of_what_was_never_text(store: Store) -> None:
    """The bytes that an earlier version stored for a PDF go with --prune; the PDF is named as failed."""
    await run(store, [item("a.pdf"), item("b.md")])
    pdf = Problem("a.pdf", "a PDF", no_text=True)
    counts = await run(store, [pdf, item("b.md")], prune=lambda _: True)

    assert sorted(store.documents) == ["b.md"]
    assert (counts.removed, counts.failed) == (1, [pdf])


async def test_the_command_names_what_it_leaves_out(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scan fails by name and the status is 1; an image is skipped by name, and alone it changes no status."""
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    words = ["ingest", "c", str(tmp_path), "--url", store.url]
    first = await asyncio.to_thread(main.main, words)
    assert (first, capsys.readouterr().err) == (0, "skipped: image.png: binary, not text\n")
    text = documents.lines(["Water flows over the dam."])
    (tmp_path / "paper.pdf").write_bytes(documents.pdf(text, documents.picture()))
    (tmp_path / "scan.pdf").write_bytes(documents.pdf(documents.picture()))
    second = await asyncio.to_thread(main.main, words)
    said = capsys.readouterr()
    third = await asyncio.to_thread(main.main, [*words, "--json"])
    told = json.loads(capsys.readouterr().out)

    assert second == third == 1
    assert "note: paper.pdf: no text on page 2: only pictures\n" in said.err
    scan = "a scan: 1 page without text; recognise its text (OCR) first"
    assert f"failed: scan.pdf: {scan}\n" in said.err
    assert "1 stored (1 chunks), 1 unchanged, 1 skipped, 1 failed; " in said.out
    assert store.documents["paper.pdf"]["text"] == "Water flows over the dam."
    assert sorted(store.documents) == ["a.md", "paper.pdf"]
    assert (told["files"], told["unchanged"]) == (4, 2)
    assert told["failed"] == [{"id": "scan.pdf", "reason": scan}]
    assert told["skipped"] == [{"id": "image.png", "reason": "binary, not text"}]


@pytest.mark.parametrize("answer_lost", [False, True])
async def test_outages_lose_and_double_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, answer_lost: bool
) -> None:
    """Cut connections, refusals and server errors, before or after the write took place: all is stored once."""
    monkeypatch.setattr(upload, "FIRST_PAUSE_S", 0.01)
    store.faults = [0, 503, 429, 500, 0, 504, 0, 503]
    store.answer_lost = answer_lost
    counts = await run(store, [item(f"d{n}") for n in range(100)])

    assert len(store.documents) == 100
    assert counts.stored + counts.unchanged == 100
    assert counts.failed == []


async def test_bad_document_among_good_ones(store: Store) -> None:
    """A document the server refuses is found and reported; all others of its batch are stored."""
    store.poison = "poison"
    found = [item(f"d{n}", "poison" if n in {3, 30} else "text") for n in range(32)]
    counts = await run(store, found)

    assert sorted(problem.id for problem in counts.failed) == ["d3", "d30"]
    assert len(store.documents) == 30


async def test_convicted_job_is_the_documents_fault(store: Store) -> None:
    """`job_failed` is not waited out."""
    store.faults = [599]
    counts = await run(store, [item("d")])

    assert [problem.id for problem in counts.failed] == ["d"]


async def test_patience_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stays away ends the run with what to do, and what was stored stays."""
    monkeypatch.setattr(upload, "FIRST_PAUSE_S", 0.01)
    store.faults = [200] + [503] * 1000
    async with AsyncSpillway(store.url, max_retries=0) as client:
        made = Upload(client, "c", "s", counts=Counts(), notice=lambda *_: None, patience_s=0.3)
        with pytest.raises(Stop, match="the same command goes on"):
            await made.run(iter([item(f"d{n}") for n in range(64)]))

    assert len(store.documents) == 32


@pytest.mark.parametrize("status", [401, 403, 404, 409])
async def test_hopeless(store: Store, status: int) -> None:
    """A wrong key, a deleted collection or another encoder ends the run at once."""
    store.faults = [status] * 100
    with pytest.raises(Stop):
        await run(store, [item(f"d{n}") for n in range(200)])


async def test_interrupted_run_resumes(store: Store) -> None:
    """A run cancelled in the middle leaves what it stored; the next one sends the rest only."""
    began = asyncio.Event()

    def slowly() -> Iterable[Found]:
        for n in range(320):
            if n == 160:
                loop.call_soon_threadsafe(began.set)
            yield item(f"d{n:03}")

    loop = asyncio.get_running_loop()
    task = asyncio.create_task(run(store, slowly()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = len(store.documents)
    counts = await run(store, slowly())

    assert 0 < before < 320
    assert len(store.documents) == 320
    assert counts.unchanged >= before
    assert counts.stored + counts.unchanged == 320
