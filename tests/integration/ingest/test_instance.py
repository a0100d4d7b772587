"""The client, the commands and the examples against a whole instance: real processes, model, Redis and index."""

from __future__ import annotations

import array
import asyncio
import contextlib
import heapq
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import spillway_client as sw

from cli import handbook, sample
from cli.main import main

ROOT = Path(__file__).resolve().parents[3]
# A worker's cold start takes longer than the rest of this file.
KILLED = ["router-0", "vector_search-0"]
if os.environ.get("SPILLWAY_PROFILE") == "soak":
    KILLED = ["gpu_worker-0", *KILLED * 5]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPILLWAY_")}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **more}


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def spillway(*words: object) -> Done:
    """Run a command in this process, which saves a second of imports each."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return Done(status, out.getvalue(), err.getvalue())


class Running:
    """An instance of this module's own."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        started = self.process(
            "up", "--detach", "--no-sample", "--port", "0", SPILLWAY_OVERFLOW_WORKERS="0"
        )
        assert started.returncode == 0, started.stdout + started.stderr
        self.url = str(self.note("supervisor")["url"])

    def process(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cli.main", *words, "--data-dir", str(self.data_dir)],
            env=environment(**env),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    def note(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.data_dir / "run" / f"{name}.json").read_text())
        return found

    def run(self, *words: object) -> Done:
        return spillway(*words, "--data-dir", self.data_dir)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data_dir = tmp_path_factory.mktemp("instance")
    try:
        yield Running(data_dir)
    finally:
        spillway("down", "--data-dir", data_dir)


@pytest.fixture
async def client(instance: Running) -> AsyncIterator[sw.AsyncSpillway]:
    async with sw.AsyncSpillway(instance.url, timeout_s=30) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = {
        "pets/cats.md": "# Cats\n\nThe kitten slept on the warm rug all afternoon.",
        "money/bonds.txt": "Yields on government bonds rose sharply after the auction.",
        "space.rst": "Orbits\n======\n\nThe probe entered an orbit around Jupiter's moon Europa.",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_ingest_then_search(instance: Running, folder: Path) -> None:
    """A folder becomes a collection whose search answers right; a second run stores nothing."""
    first = instance.run("ingest", "tour", folder)
    again = instance.run("ingest", "tour", folder)
    found = instance.run("search", "tour", "a young feline taking a nap", "-k", 1)

    assert (first.returncode, again.returncode, found.returncode) == (0, 0, 0), first.stderr
    assert "3 stored" in first.stdout
    assert "0 stored (0 chunks), 3 unchanged" in again.stdout
    assert "pets/cats.md" in found.stdout
    assert "kitten slept" in found.stdout


def test_change_prune_and_bad_files(instance: Running, folder: Path) -> None:
    """Changed files are replaced, gone ones removed with --prune, bad ones reported with exit status 1."""
    instance.run("ingest", "changes", folder)
    (folder / "space.rst").write_text("The recipe needs two eggs and a cup of flour.")
    (folder / "money" / "bonds.txt").unlink()
    (folder / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    second = instance.run("ingest", "changes", folder, "--prune")
    found = json.loads(instance.run("search", "changes", "baking", "--json").stdout)["data"]

    assert second.returncode == 1
    assert "1 stored" in second.stdout
    assert "1 removed" in second.stdout
    assert "failed: bad.txt: not UTF-16, which its first bytes announce" in second.stderr
    assert found[0]["id"] == "space.rst"
    assert {hit["id"] for hit in found} == {"space.rst", "pets/cats.md"}


def test_failures_are_sentences(instance: Running, tmp_path: Path) -> None:
    """No traceback for what a user can get wrong."""
    (tmp_path / "note.txt").write_text("the water rises behind the dam")
    assert instance.run("ingest", "failures", tmp_path).returncode == 0
    cases = [
        (instance.run("search", "nothing-here", "x"), 1, "nothing-here"),
        (instance.run("search", "failures", "x", "--filter", "{"), 2, "--filter"),
        (instance.run("search", "failures", "x", "--filter", '{"$what": 1}'), 1, "$what"),
        (instance.run("ingest", "failures", tmp_path / "gone"), 1, "no such file or folder"),
        (instance.run("ingest", "BAD NAME", tmp_path), 1, "name"),
        (instance.run("models", "--url", "http://127.0.0.1:1"), 1, "cannot reach the server"),
        (spillway("models", "--data-dir", tmp_path), 2, "spillway up"),
    ]
    for done, status, text in cases:
        assert done.returncode == status, done
        assert text in done.stderr, done
        assert "Traceback" not in done.stderr


def test_models(instance: Running) -> None:
    """The default encoder is listed."""
    done = instance.run("models")

    assert done.returncode == 0
    assert done.stdout.strip()


async def test_ingest_through_kills(instance: Running, tmp_path: Path) -> None:
    """Router and index (in the soak also the worker) killed during an ingest: every file ends up in, once."""
    for n in range(120):
        (tmp_path / f"{n:03}.txt").write_text(f"note {n}: " + "the water rises behind the dam " * 6)
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", "ingest", "killed", tmp_path, "--data-dir",
        instance.data_dir, env=environment(), cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    for name in KILLED:
        await asyncio.sleep(0.7)
        os.kill(instance.note(name)["pid"], signal.SIGKILL)
    out, _ = await asyncio.wait_for(running.communicate(), 90)
    async with sw.AsyncSpillway(instance.url, max_retries=10) as client:
        ids = [document.id async for document in client.documents("killed").iterate(page=100)]

    assert running.returncode == 0, out
    assert sorted(ids) == [f"{n:03}.txt" for n in range(120)]


async def test_embeddings(client: sw.AsyncSpillway) -> None:
    """Floats and bytes are the same vectors; token lists and lower dimensions work."""
    texts = ["a cat on a mat", "a kitten on a rug"]
    floats = await client.embeddings.create(texts)
    raw = await client.embeddings.create(texts, as_="bytes")
    short = await client.embeddings.create([[101, 4937, 102]], dimensions=64)

    assert [array.array("f", vector).tolist() for vector in raw.vectors] == floats.vectors
    assert floats.usage.total_tokens > 0
    assert floats.request_id
    assert len(short.vectors[0]) == 64


async def test_rerank(client: sw.AsyncSpillway) -> None:
    """The relevant document comes first, with its text if asked for."""
    ranking = await client.rerank(
        "capital of France", ["Jupiter's moons", "Paris"], top_n=1, return_documents=True
    )

    assert [(result.index, result.text) for result in ranking.results] == [(1, "Paris")]


async def test_collection_life(client: sw.AsyncSpillway) -> None:
    """Create, add, list, get, search with a filter, delete: as the types say."""
    created = await client.collections.create("life", dimension=2, model=None, metric="l2")
    documents = client.documents("life")
    written = await documents.add(
        [
            {"id": f"a/{n}", "vector": [float(n), 0.0], "metadata": {"odd": n % 2 == 1}}
            for n in range(5)
        ]
    )
    found = await client.search(
        "life", vector=[0.0, 0.0], k=9, filter={"odd": True}, after=written.applied
    )
    many = await client.search_many("life", vectors=[[0.0, 0.0], [4.0, 0.0]], k=1)
    listed = [d.id async for d in documents.iterate(page=2)]
    one = await documents.get("a/3")
    deleted = await documents.delete(["a/3", "never"])
    left = await client.collections.get("life")
    await client.collections.delete("life")

    assert (created.name, created.dimension, created.model) == ("life", 2, None)
    assert [item.status for item in written.data] == ["stored"] * 5
    assert [hit.id for hit in found.data] == ["a/1", "a/3"]
    assert found.data[0].score == pytest.approx(-1.0)
    assert [result.data[0].id for result in many] == ["a/0", "a/4"]
    assert sorted(listed) == [f"a/{n}" for n in range(5)]
    assert (one.id, one.metadata) == ("a/3", {"odd": True})
    assert deleted.deleted == 1
    assert left.stats is not None
    assert left.stats["documents"] == 4
    with pytest.raises(sw.NotFoundError):
        await client.collections.get("life")


async def test_requests(client: sw.AsyncSpillway) -> None:
    """A result carries an id by which its state and events are found again; the same key finds the same request."""
    first = await client.embeddings.create("once", idempotency_key="key-of-test")
    again = await client.embeddings.create("once", idempotency_key="key-of-test")
    assert first.request_id is not None
    state = await client.requests.get(first.request_id)
    events = [event async for event in client.requests.events(first.request_id)]

    assert (again.request_id, again.vectors) == (first.request_id, first.vectors)
    assert state.id == first.request_id
    assert state.result is not None
    assert events
    with pytest.raises(sw.ConflictError):
        await client.embeddings.create("other", idempotency_key="key-of-test")


async def test_cancelling_the_task_ends_the_request(client: sw.AsyncSpillway) -> None:
    """A cancelled call's request is cancelled at the server, though it would have survived a lost connection."""
    texts = ["a long text to keep the worker busy " * 25] * 100
    task = asyncio.create_task(
        client.embeddings.create(texts, idempotency_key="to-cancel", timeout_s=120)
    )
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        state = (await client.requests.get("to-cancel")).state
        if state not in {"queued", "running"}:
            break
        await asyncio.sleep(0.1)

    assert state == "cancelled"


async def test_errors(client: sw.AsyncSpillway) -> None:
    """The server's errors arrive as their classes, with code and request id."""
    with pytest.raises(sw.NotFoundError) as missing:
        await client.search("no-such", "x")
    with pytest.raises(sw.BadRequestError):
        await client.embeddings.create("")
    with pytest.raises(sw.NotFoundError):
        await client.embeddings.create("x", model="no-such-model")
    with pytest.raises((sw.DeadlineExceededError, sw.APITimeoutError, sw.RateLimitError)):
        await client.embeddings.create(["long text " * 50] * 200, timeout_s=0.05)

    assert missing.value.request_id
    assert missing.value.code


async def test_sample(
    instance: Running,
    client: sw.AsyncSpillway,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The sample loads, a second load stores nothing, and its search answers a question."""
    for module in (textwrap, heapq):
        assert module.__file__ is not None
        shutil.copy(module.__file__, tmp_path)
    (tmp_path / "README.md").write_text("# Spillway\n\nNothing accepted is lost.")
    monkeypatch.setattr(sample, "_PROJECT", tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sample, "MAX_DOCUMENTS", 40)
    said: list[str] = []
    count = await sample.load(instance.url, said.append)
    assert await sample.load(instance.url) == count
    found = await client.search("docs", "break a long paragraph into lines", k=3)

    assert count >= 40
    assert said
    assert found.data[0].id.startswith("python/textwrap")


async def test_handbook(
    instance: Running,
    client: sw.AsyncSpillway,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The pages are written and stored once; an edited one is restored; a page that is none of ours is left alone."""
    monkeypatch.setattr(sample, "documents", lambda: iter(()))
    folder = handbook.directory(tmp_path)
    count = await sample.load(instance.url, data_dir=tmp_path)
    found = [page async for page in client.documents("handbook").iterate()]
    (folder / "notes.md").write_text("# Mine")
    (folder / found[0].id).write_text("# Edited")
    said: list[str] = []
    assert await sample.load(instance.url, said.append, data_dir=tmp_path) == count
    again = [page async for page in client.documents("handbook").iterate()]

    assert count == len(found) == len(list(folder.glob("*.md"))) - 1
    assert count >= 250
    assert {page.chunks for page in found} == {1}
    assert [page.id for page in found] == [page.id for page in again]
    assert (folder / found[0].id).read_text().startswith("# ")
    assert (folder / found[0].id).read_text() != "# Edited"
    assert (folder / "notes.md").exists()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(instance: Running, name: str, folder: Path) -> None:
    """Every example runs and prints something."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), str(folder)],
        env=environment(SPILLWAY_URL=instance.url),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
