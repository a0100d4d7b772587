"""The training of a quantizer by faiss, in a process of its own: its memory is given back, and its end harms nobody.

`python -m services.vector_search.index.quantizer_training` reads a sample from its input and writes a quantizer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from services.vector_search.index.quantizer import (
    USUAL,
    CodeBits,
    Coding,
    Quantizer,
    subspaces_of,
    unrotated,
    words_of,
)
from services.vector_search.index.rows import Floats, Metric

# Rows of a sample that faiss wants at least for every centroid, and rows that are enough for words and rotation.
LEAST_PER_LIST = 39
ENOUGH_ROWS = 32_768
# Bytes of a sample, at most: of wide rows there are fewer, and so fewer lists.
SAMPLE_BYTES = 64 << 20
_ROUNDS = 10
# Rows of a centroid, at most, that its place is found from.
_ROWS_PER_LIST = 256
# Rotations are learned in so many rounds, from so many rows; the time of a round is cubic in the dimensions.
_TURNS, _LEAST_TURNS, _TURNS_AT, _TURNED_ROWS = 8, 2, 2048, 16_384
_CHECK_S = 0.2
# How much of what a failed training wrote to its error output is told.
_TOLD = 300


class TrainingFailed(Exception):
    """A quantizer could not be trained; the message says why."""


class TrainingWork(msgspec.Struct, frozen=True):
    """What is to be trained: for `rows` rows, with so many lists at most, by a sample of float32 rows.

    Codes have 8 bits for every four dimensions, or 4 for every two.
    """

    metric: Metric
    lists: int
    rows: int
    sample: int
    dimension: int
    threads: int
    coding: Coding = USUAL


Trainer = Callable[[TrainingWork, Floats, Callable[[], bool]], Quantizer]


def train(
    work: TrainingWork,
    sample: Floats,
    _stopped: Callable[[], bool] = bool,
    *,
    rotation: Floats | None = None,
) -> Quantizer:
    """Train here, with faiss; needs at least one row. Lists are fewer where the sample's rows are few or alike.

    A `rotation` of an earlier training of such rows, (width, dimension), is taken over: learning it takes longest.
    """
    import faiss  # noqa: PLC0415 - only the process that trains needs it

    faiss.omp_set_num_threads(work.threads)
    bits, count_of_words = work.coding.code_bits, words_of(work.coding.code_bits)
    subspaces, part = subspaces_of(work.dimension, bits)
    width = subspaces * part
    unlike = _unlike(sample)
    del sample
    lists = max(1, min(work.lists, len(unlike) // LEAST_PER_LIST))
    # A rotation cannot be learned from fewer rows than dimensions, nor words from fewer rows than there are.
    count = max(len(unlike), words_of(8), width)
    order = np.random.default_rng(work.rows).permutation(count) % len(unlike)
    padded = np.zeros((count, width), np.float32)
    padded[:, : work.dimension] = unlike[order]
    del unlike

    if not work.coding.rotate:
        rotation = unrotated(width, work.dimension)
    elif rotation is None:
        rotation = _rotation(padded, subspaces, bits)[:, : work.dimension]
    rotated = padded[:, : work.dimension] @ rotation.T
    del padded
    means = faiss.Kmeans(
        width, lists, niter=_ROUNDS, seed=1, max_points_per_centroid=_ROWS_PER_LIST, min_points_per_centroid=1
    )  # fmt: skip
    means.train(rotated)
    rough = Quantizer(
        work.metric,
        work.rows,
        np.ascontiguousarray(rotation),
        np.ascontiguousarray(means.centroids, np.float32),
        np.zeros((subspaces, count_of_words, part), np.float32),
    )
    words = faiss.ProductQuantizer(width, subspaces, bits)
    words.cp.niter, words.cp.min_points_per_centroid = _ROUNDS, 1
    words.cp.max_points_per_centroid = ENOUGH_ROWS // count_of_words
    words.train(rough.residuals(rotated, rough.nearest_lists(rotated)))
    found = faiss.vector_to_array(words.centroids).reshape(subspaces, count_of_words, part)
    return Quantizer(
        rough.metric, rough.trained, rough.rotation, rough.centroids, np.ascontiguousarray(found)
    )


def _rotation(rows: Floats, subspaces: int, bits: CodeBits) -> Floats:
    """Learn the rotation of rows (OPQ), (width, width)."""
    import faiss  # noqa: PLC0415

    width = rows.shape[1]
    turn = faiss.OPQMatrix(width, subspaces)
    turn.niter = max(_LEAST_TURNS, min(_TURNS, _TURNS_AT // width))
    turn.niter_pq, turn.niter_pq_0 = 2, _ROUNDS
    turn.max_train_points = _TURNED_ROWS
    words = faiss.ProductQuantizer(width, subspaces, bits)
    turn.pq = words
    turn.train(rows)
    found: Floats = faiss.vector_to_array(turn.A).reshape(width, width)
    return found


def _unlike(sample: Floats) -> Floats:
    """Return the rows without those that are equal to others."""
    names = np.ascontiguousarray(sample).view(f"V{sample.shape[1] * 4}").ravel()
    found: Floats = sample[np.unique(names, return_index=True)[1]]
    return found


def train_apart(work: TrainingWork, sample: Floats, stopped: Callable[[], bool]) -> Quantizer:
    """Train in a process of its own, which is ended once `stopped` says so; TrainingFailed if there is no result."""
    threads = str(work.threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",  # searches have better uses for the time
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
    except OSError as error:
        raise TrainingFailed(f"its process does not start: {error}") from error
    with process:
        _give(process, msgspec.json.encode(work) + b"\n", sample)
        while True:
            try:
                made, errors = process.communicate(timeout=_CHECK_S)
                break
            except subprocess.TimeoutExpired:
                if stopped():
                    process.kill()
    if process.returncode:
        why = errors.decode(errors="replace").strip()[-_TOLD:]
        raise TrainingFailed(f"its process ended with status {process.returncode}: {why}")
    try:
        return Quantizer.from_bytes(made)
    except ValueError as error:
        raise TrainingFailed(str(error)) from error


def _give(process: subprocess.Popen[bytes], header: bytes, sample: Floats) -> None:
    """Write a process's input, which it reads before all else, and close it; a process that has ended takes none."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(header)
        pipe.write(sample.data)
    process.stdin = None


def _given(work: TrainingWork) -> Floats:
    """Read the sample, which nobody else keeps."""
    data = sys.stdin.buffer.read(4 * work.sample * work.dimension)
    return np.frombuffer(data, np.float32).reshape(work.sample, work.dimension)


def main() -> None:
    """Train what the input asks for; where memory runs out, this is the process to end."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    work = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrainingWork)
    sys.stdout.buffer.write(train(work, _given(work)).to_bytes())


if __name__ == "__main__":
    main()
