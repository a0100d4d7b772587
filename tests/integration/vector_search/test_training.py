"""The training of a quantizer in a process of its own: its result, its failures, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from services.vector_search.index.index import Index
from services.vector_search.index.quantizer import Quantizer
from services.vector_search.index.quantizer_training import (
    TrainingFailed,
    TrainingWork,
    train,
    train_apart,
)

NONE = np.zeros(0, np.int64)


def work(rows: int) -> TrainingWork:
    return TrainingWork("l2", 8, rows, rows, 16, threads=1)


def sample(rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(rows).standard_normal((rows, 16)).astype(np.float32)


def test_it_makes_what_would_have_been_made_here() -> None:
    """The same sample makes the same quantizer, which names itself by its hash."""
    apart = train_apart(work(600), sample(600), lambda: False)
    here = train(work(600), sample(600))
    assert apart.version == here.version
    assert Quantizer.from_bytes(apart.to_bytes()).version == here.version


def test_a_process_that_is_killed_or_stopped_is_a_failed_training() -> None:
    """By whoever wants its memory, or because the shard closes: there is no result, and no process is left."""

    def trainers() -> list[int]:
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none that works
                if "quantizer_training" in " ".join(child.cmdline()):
                    found.append(child.pid)
        return found

    def killed() -> bool:
        for process in trainers():
            os.kill(process, signal.SIGKILL)
        return False

    many = 60_000
    with pytest.raises(TrainingFailed, match="status -9"):
        train_apart(work(many), sample(many), killed)
    with pytest.raises(TrainingFailed, match="status -9"):
        train_apart(work(many), sample(many), lambda: True)
    assert not trainers()


def test_a_process_says_why_it_fails(tmp_path: Path) -> None:
    """A sample that is shorter than promised ends it before it has taken long."""
    wrong = TrainingWork("l2", 8, 600, 600, 17, threads=1)
    with pytest.raises(TrainingFailed, match="cannot reshape"):
        train_apart(wrong, sample(600), lambda: False)
    done = subprocess.run(
        [sys.executable, "-m", "services.vector_search.index.quantizer_training"],
        input=b"",
        capture_output=True,
        check=False,
    )
    assert done.returncode != 0


def test_an_index_trains_apart_and_goes_on_when_that_process_dies() -> None:
    """The default trainer, from the index: searches are exact until there are lists."""
    rows = sample(2000)
    index = Index(16, "l2", exact_below=300, threads=1, room=lambda: 400_000)
    labels = np.arange(len(rows))
    index.publish(rows, labels, labels, NONE)
    assert index.maintain()
    assert (index.now.kind, index.now.stats().path) == ("ivfpq", "exact")
    while index.maintain():
        pass
    assert index.now.stats().path == "ivfpq"
    assert [row[0] for row in index.search(rows[:5], 1).labels] == [0, 1, 2, 3, 4]
