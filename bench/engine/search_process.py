"""A search of inverted lists in a process of its own, which answers one generator's retrievals over a socket.

`python -m bench.engine.search_process SOCKET ROWS REPEATS` answers lines of JSON: {"tokens", "lists", "cores"} with
{"row"}. Every token is a query of its own, as where a document has one vector a token; a retrieval reads so many lists
for each. {"tokens", "wait_s"} searches nothing and answers after so many seconds: a recorded latency, replayed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench import ROOT
from services.vector_search.index.inverted_lists import Coded, InvertedLists, code
from services.vector_search.index.lists_maintenance import lists_for
from services.vector_search.index.quantizer_training import TrainingWork, train
from services.vector_search.index.rows import Floats, RowsView

DIMENSION, VOCABULARY, SEED = 64, 8192, 11
_KEPT = 4  # rows that each query finds


class TokenSearch:
    """Lists over random rows, each as often as `repeats` says, and a vector for each token."""

    def __init__(self, rows: int, repeats: int) -> None:
        rng = np.random.default_rng(SEED)
        centres = rng.standard_normal((256, DIMENSION), np.float32)
        held = centres[rng.integers(0, 256, rows)]
        held = _unit(held + 0.5 * rng.standard_normal(held.shape, np.float32))
        self._queries = _unit(rng.standard_normal((VOCABULARY, DIMENSION), np.float32))
        work = TrainingWork("dot", lists_for(rows), rows, rows, DIMENSION, 1)
        quantizer = train(work, held)
        numbers = np.arange(rows)
        view = RowsView(held, numbers, numbers, np.ones(rows, bool), rows)
        coded = code(quantizer, view, numbers)
        often = Coded(*(np.concatenate([each] * repeats) for each in coded))
        self._lists = InvertedLists.empty(quantizer).with_more(often, rows)
        self._keep = np.ones(rows, bool)

    @property
    def lists(self) -> int:
        """Return how many lists there are."""
        return self._lists.quantizer.lists

    def row(self, tokens: Sequence[int], lists: int, cores: Sequence[int]) -> int:
        """Return the row that the codes rank best for any of the tokens, computed on these cores."""
        if set(cores) != os.sched_getaffinity(0):
            os.sched_setaffinity(0, cores)
        queries = self._queries[np.asarray(tokens) % VOCABULARY]
        found = self._lists.candidates(self._keep, queries, _KEPT, probes=lists, threads=len(cores))
        return int(found.rows.flat[found.scores.argmax()])


def _unit(rows: Floats) -> Floats:
    unit: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


class SearchLink:
    """A generator's connection to the process; one call at a time."""

    def __init__(self, place: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(place)
        self._file = self._socket.makefile("rw", encoding="utf-8")
        self.lists = int(self._answer()["lists"])

    def row(self, tokens: Sequence[int], how: Mapping[str, Any]) -> int:
        """Return the row found for the tokens; `how` has the lists and cores, or the wait."""
        self._file.write(json.dumps({"tokens": list(tokens), **how}) + "\n")
        self._file.flush()
        return int(self._answer()["row"])

    def _answer(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise ConnectionError("the search process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def search_process(place: Path, rows: int, repeats: int) -> Iterator[str]:
    """Run the process; gives the socket's path once it listens, RuntimeError if it ends before."""
    words = [sys.executable, "-m", "bench.engine.search_process", str(place)]
    made = subprocess.Popen(
        [*words, str(rows), str(repeats)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        if made.stdout is None or made.stdout.readline() != "ready\n":
            raise RuntimeError("the search process did not start")
        yield str(place)
    finally:
        made.kill()
        made.communicate()
        place.unlink(missing_ok=True)


def _serve(search: TokenSearch, connection: socket.socket) -> None:
    with connection, connection.makefile("rw", encoding="utf-8") as file:
        file.write(json.dumps({"lists": search.lists}) + "\n")
        file.flush()
        for line in file:
            asked = json.loads(line)
            if "wait_s" in asked:
                time.sleep(asked["wait_s"])
                row = 0
            else:
                row = search.row(**asked)
            file.write(json.dumps({"row": row}) + "\n")
            file.flush()


def main() -> None:
    """Build the lists, then serve connections until the process is ended; each connection has a thread of its own."""
    place, rows, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    search = TokenSearch(rows, repeats)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_serve, args=(search, connection), daemon=True).start()


if __name__ == "__main__":
    main()
