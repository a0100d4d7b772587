"""A query's vector as numbers and as base64: the same bytes, and the same refusals."""

from __future__ import annotations

import base64
from array import array
from functools import partial

import msgspec
import pytest

from common.errors import InvalidRequest
from common.wire.workflows import SearchRequest
from services.router.http.quick_search import read_at_once
from services.router.text import collections
from services.router.text.bodies import RequestLimits

LIMITS = RequestLimits(2048, 100_000, 32, 8192)
ROWS = [[0.5, -1.25, 3.0], [0.0, 1e-30, -3.4e38]]


def _packed(row: list[float]) -> str:
    return base64.b64encode(array("f", row).tobytes()).decode()


def _ask(metric: str = "dot", **body: object) -> SearchRequest:
    raw = msgspec.json.encode(body)
    return collections.search(raw, 3, metric, LIMITS, spec=None, prompt="")


def test_both_forms_mean_the_same() -> None:
    """Numbers and base64 give the same float32 rows, alone, together and mixed."""
    expected = b"".join(array("f", row).tobytes() for row in ROWS)
    assert _ask(vectors=ROWS).vectors == expected
    assert _ask(vectors=[_packed(row) for row in ROWS]).vectors == expected
    assert _ask(vectors=[ROWS[0], _packed(ROWS[1])]).vectors == expected
    alone = _ask(vector=_packed(ROWS[1]))
    assert (alone.vectors, alone.many, alone.count) == (expected[12:], False, 1)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ([1.0, 2.0], "dimension_mismatch"),
        ([1.0, 2.0, 3.0, 4.0], "dimension_mismatch"),
        ([], "dimension_mismatch"),
        ([1.0, 1e39, 0.0], "invalid_value"),
        ([0.0, -0.0, 0.0], "zero_vector"),
    ],
)
def test_both_forms_are_refused_alike(row: list[float], code: str) -> None:
    """A wrong dimension, a number beyond float32 and a zero under cosine name the row that holds them."""
    for form in (row, _packed(row)):
        with pytest.raises(InvalidRequest, match=r"vectors\[1\]") as refused:
            _ask("cosine", vectors=[ROWS[0], form])
        assert (refused.value.code, refused.value.param) == (code, "vectors[1]")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_base64_holds_finite_numbers(number: float) -> None:
    """What JSON cannot say is refused where base64 says it."""
    with pytest.raises(InvalidRequest) as refused:
        _ask(vector=_packed([1.0, number, 2.0]))
    assert refused.value.code == "invalid_value"


@pytest.mark.parametrize("text", ["AACAPw", "AAC*PwAAAEA=", "AACA PwAAAEAAAEBA", "é", "AACAPwA="])
def test_broken_base64_is_refused(text: str) -> None:
    """Padding, characters and whole numbers are checked."""
    with pytest.raises(InvalidRequest) as refused:
        _ask(vector=text)
    assert refused.value.code in {"invalid_value", "dimension_mismatch"}


def test_only_what_reads_quickly_is_read_on_the_loop() -> None:
    """Large bodies are, of vectors in base64; texts, many numbers and escaped names are not."""
    body = partial(msgspec.json.encode)
    packed = [_packed([1.0] * 384)] * 256
    assert read_at_once(body({"text": "short"}))
    assert read_at_once(body({"vectors": packed}))
    assert not read_at_once(body({"vectors": [[0.25] * 384] * 256}))
    assert not read_at_once(body({"texts": ["word " * 10_000]}))
    assert not read_at_once(b'{"\\u0074exts": ["' + b"word " * 10_000 + b'"]}')
    assert not read_at_once(body({"vectors": packed * 8}))
