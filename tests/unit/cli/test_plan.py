"""`spillway plan retrieval`: what is printed, from flags and from a file, and what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli import main

FLAGS = ("--inference", "12ms", "--retrieval", "30ms", "--interval", "8", "--batch", "64")


def plan(*words: str) -> int:
    """Run the command."""
    return main.main(["plan", "retrieval", *words])


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """The load in a line, what is now, and the best of as many units."""
    assert plan(*FLAGS, "--inference-units", "4", "--retrieval-units", "4") == 0
    assert capsys.readouterr().out.splitlines() == [
        (
            "a batch of 64: 8 steps of 12 ms, then a retrieval of 30 ms; "
            "without waiting on either side 80.8% of the units generate"
        ),
        "",
        "       units that          tokens/s, times that     generating units        retrieving units",
        "       generate  retrieve  vary little  vary much   compute  wait  queue    work    idle",
        "now           4         4     16,254.0   16,254.0     76.2%   24%     0%   23.8%   76.2%",
        "best          6         2     24,381.0   22,808.3     76.2%   24%     0%   71.4%   28.6%",
    ]


def test_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file gives the same as flags, which go before it; latencies of a shard give the mean, and what many take."""
    path = tmp_path / "plan.json"
    latencies = [0.02 + 0.00001 * number for number in range(2001)]
    path.write_text(
        json.dumps({"inference_s": 1.0, "interval": 8, "batch": 64, "units": 8,
                    "retrieval_latencies_s": latencies})
    )  # fmt: skip
    assert plan("--file", str(path), "--inference", "12ms") == 0
    shown = capsys.readouterr().out

    assert "8 steps of 12 ms, then a retrieval of 30 ms" in shown
    assert "best          6         2     24,381.0" in shown
    assert "     1       30.020       39.820" in shown
    assert "   128       40.060     ≥ 40.160" in shown
    assert plan("--file", str(path), "--inference", "12ms", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["best"]["split"] == {"inference": 6, "retrieval": 2}
    assert found["best"]["retrieval_idles"] == pytest.approx(2 / 7)
    assert found["inference_share"] == pytest.approx(0.126 / 0.156)
    assert found["shards"][-1]["p99_is_known"] is False


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--units", "4"), "--inference is missing: expected a measured time, such as 12ms"),
        (("--inference", "1ms", "--units", "4"), "--retrieval is missing"),
        (FLAGS, "--units is missing: expected it, or both --inference-units and --retrieval-units"),
        ((*FLAGS, "--retrieval-units", "2"), "--units is missing"),
        ((*FLAGS, "--units", "1"), "--units is '1': expected a whole number from 2 to 200000"),
        ((*FLAGS, "--units", "2.5"), "--units is '2.5': expected a whole number from 2 to 200000"),
        ((*FLAGS, "--interval", "0"), "--interval is '0': expected a whole number from 1"),
        ((*FLAGS, "--batch", "nan"), "--batch is 'nan': expected a whole number from 1"),
        (("--inference", "soon"), "--inference is 'soon': expected 1us to 86400s"),
        (("--retrieval=-3ms",), "--retrieval is '-3ms': expected 1us to 86400s"),
        (("--file", "/nowhere.json"), "/nowhere.json: No such file or directory; expected a JSON"),
        (("--file", "/dev/zero"), "/dev/zero is no regular file"),
    ],
)
def test_bad_flags(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence names the flag, what it says and what is expected; status 2."""
    assert plan(*words) == 2
    said = capsys.readouterr().err

    assert said.startswith(f"spillway: {sentence}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ('{"inference_s": 0}', "`float` >= 1e-06 - at `$.inference_s`"),
        ('{"inference_s": "1"}', "Expected `float | null`, got `str`"),
        ('{"retrieval_latencies_s": [1, null]}', "got `null` - at `$.retrieval_latencies_s[1]`"),
        ('{"speed": 1}', "unknown field `speed`"),
        ("[" * 100_000, "expected a JSON object of measured times"),
        ("\x00\xff", "malformed"),
    ],
)
def test_bad_files(text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence names the file, the place in it and what is expected."""
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    assert plan("--file", str(path)) == 2
    said = capsys.readouterr().err

    assert said.startswith(f"spillway: {path}: ")
    assert why in said
    assert said.count("\n") == 1
