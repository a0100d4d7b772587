"""What commands print: safe for a terminal, readable in a log."""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path

import pytest
from spillway_client import Hit

from cli.files import Problem, Skipped
from cli.http import NoServer, endpoint
from cli.ingest import IngestProgress, describe, summary, time_left
from cli.sample import standard_library
from cli.search import show
from cli.upload import Counts, Noted
from common.errors import ConfigError


def test_hit() -> None:
    """A hit shows score, id, offsets, title and at most three lines of its passage."""
    hit = Hit("a.md", 0.5, 0, 3, 9, text="word " * 200, metadata={"title": "A title"})
    lines = show(hit, 60).split("\n")
    paged = Hit("a.pdf", 0.5, 0, 30, 90, metadata={"pages": [0, 20, 25, 40], "first_page": 7})

    assert lines[0] == "0.500  a.md:3-9  A title"
    assert show(paged, 60) == "0.500  a.pdf:30-90 page 9"
    assert len(lines) == 4
    assert max(map(len, lines)) <= 60


def test_hits_cannot_drive_the_terminal() -> None:
    """Control characters of ids, titles and texts are not printed."""
    hit = Hit("a\x1b[2J", 1.0, text="\x1b]0;owned\x07 text", metadata={"title": "\r\x1b[31m"})

    assert all(c.isprintable() or c == "\n" for c in show(hit, 80))


def test_summary() -> None:
    """Counts that are zero are left out, except what was stored."""
    counts = Counts(stored=2, chunks=5, unchanged=10, failed=[Problem("a", "b")])

    assert describe(counts) == "2 stored (5 chunks), 10 unchanged, 1 failed"
    assert describe(Counts()) == "0 stored (0 chunks)"


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Outside a terminal there are plain lines; failures are named on stderr, each of them."""
    out, counts = io.StringIO(), Counts()
    progress = IngestProgress(out)
    for n in range(25):
        counts.failed.append(Problem(f"f{n}", "bad"))
        progress(counts, counts.failed[-1])
    progress.end(counts, "c")
    errors = capsys.readouterr().err.splitlines()

    assert out.getvalue().startswith("c: 0 stored (0 chunks), 25 failed; ")
    assert "\x1b" not in out.getvalue()
    assert errors == [f"failed: f{n}: bad" for n in range(25)]


def test_what_is_skipped_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no document is named with the reason, on stderr, and counted in the summary; it is no failure."""
    out, counts = io.StringIO(), Counts()
    progress = IngestProgress(out)
    for n in range(25):
        counts.skipped.append(Skipped(f"f{n}.png", "binary, not text"))
        progress(counts, counts.skipped[-1])
    counts.failed.append(Problem("a.pdf", "a PDF"))
    progress(counts, counts.failed[-1])
    progress.end(counts, "c")
    errors = capsys.readouterr().err.splitlines()

    assert out.getvalue().startswith("c: 0 stored (0 chunks), 25 skipped, 1 failed; ")
    assert errors[0] == "skipped: f0.png: binary, not text"
    assert errors[25:] == ["failed: a.pdf: a PDF"]


def test_time_left() -> None:
    """What is left is told from what is done; nothing is told before the first file, or where the total is unknown."""
    assert time_left(0, 100, 5.0) == time_left(5, 0, 5.0) == time_left(9, 9, 5.0) == ""
    assert time_left(50, 100, 20.0) == "20 s"
    assert time_left(10, 100, 60.0) == "9 min"
    assert time_left(1, 1000, 60.0) == "16.6 h"


def test_summary_for_programs() -> None:
    """Every file that is not in is in the JSON with its reason."""
    counts = Counts(
        stored=1, chunks=2, failed=[Problem("a", "b")], noted=[Noted("c", "d")], files=2
    )

    assert summary(counts, "c", 1.25) == {
        "collection": "c",
        "files": 2,
        "stored": 1,
        "chunks": 2,
        "unchanged": 0,
        "removed": 0,
        "skipped": [],
        "failed": [{"id": "a", "reason": "b"}],
        "notes": [{"id": "c", "reason": "d"}],
        "seconds": 1.2,
    }


def arguments(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"url": None, "api_key": None, **given})


def test_endpoint(tmp_path: Path) -> None:
    """An address is what was given, else the environment's, else a router that runs in the data directory."""
    (tmp_path / "run").mkdir()
    run = tmp_path / "run"
    env = {"SPILLWAY_URL": "http://env", "SPILLWAY_API_KEY": "k"}
    here = arguments(data_dir=str(tmp_path))

    assert endpoint(arguments(url="http://arg"), env).url == "http://arg"
    assert endpoint(here, env).url == "http://env"
    assert endpoint(here, env).api_key == "k"
    with pytest.raises(NoServer, match="spillway up"):
        endpoint(here, {})
    (run / "router-0.json").write_text("nonsense")
    (run / "router-1.json").write_text(json.dumps({"pid": 2**22 + 1, "port": 1}))
    with pytest.raises(NoServer):
        endpoint(here, {})
    (run / "router-2.json").write_text(json.dumps({"pid": os.getpid(), "port": 8099}))
    assert endpoint(here, {}).url == "http://127.0.0.1:8099"
    with pytest.raises(ConfigError, match="SPILLWAY_URLL"):
        endpoint(here, {"SPILLWAY_URLL": "x"})


def test_standard_library() -> None:
    """The sample is bounded, in order, public names only."""
    items = list(standard_library(50))

    assert len(items) == 50
    assert items == sorted(items, key=lambda item: item.id)
    assert not any("._" in item.id for item in items)
    assert all(item.id.startswith("python/") for item in items)
