"""`spillway cost`: traces as they are found, what is printed, and what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import main
from cli.trace import RecordedLoad, read
from common.errors import ConfigError

FLAGS = {
    "--slo": "1s",
    "--accelerator": "0.01793,0.27",
    "--cpu": "0.082,0.32",
    "--price": "2.50",
}


def cost(trace: Path, *words: str, **flags: str) -> int:
    """Run the command with FLAGS, some of them replaced."""
    given_ = {**FLAGS, **{f"--{name.replace('_', '-')}": value for name, value in flags.items()}}
    pairs = [word for pair in given_.items() for word in pair]
    return main.main(["cost", "--trace", str(trace), *pairs, *words])


@pytest.fixture
def burst(tmp_path: Path) -> Path:
    """A trace of 1,000 queries within a second, and one each of the following 1,000 seconds."""
    path = tmp_path / "burst.jsonl"
    times = [*range(1000), *range(2000, 1_002_000, 1000)]
    path.write_text("".join(f'{{"timestamp": {at}, "input_length": 75}}\n' for at in times))
    return path


def test_for_people(burst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace in a line, the depths in a line, and four fleets."""
    assert cost(burst) == 0
    assert capsys.readouterr().out.splitlines() == [
        "trace  2,000 queries in 16.7 min: 2 a second on average, at most 1,000 within 1 s",
        "times  whole numbers, so taken for milliseconds (--unit s if they are seconds)",
        (
            "depth  40 queries at once on the accelerator, 8 more on the CPUs (+20.0 %): "
            "saves 16.7 % before instances are rounded up"
        ),
        "",
        "by          served by         instances     per hour      per month   saving",
        "peak        accelerator only         25        62.50      45,625.00",
        "            with spill               21        52.50      38,325.00   16.0 %",
        "average     accelerator only          1         2.50       1,825.00",
        "            with spill                1         2.50       1,825.00    0.0 %",
    ]


def test_for_programs(burst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON holds the same numbers; two devices an instance cost twice, and the CPUs what is said."""
    assert cost(burst, "--json", devices="2", cpu_price="0.25") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)

    assert found["trace"] == {
        "queries": 2000,
        "duration_s": 1001.0,
        "rate": pytest.approx(2000 / 1001),
        "peak": 1000,
    }
    assert found["depth"] == {"accelerator": 40, "cpu": 8}
    assert found["by_peak"] == {
        "accelerator_only": {"instances": 25, "cost_per_hour": 125, "cost_per_month": 91_250},
        "with_spill": {
            "instances": 21,
            "cost_per_hour": 21 * 5.25,
            "cost_per_month": 21 * 5.25 * 730,
        },
        "saving": pytest.approx(0.118),
    }


def test_cpus_that_cannot(burst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CPUs that miss the SLO with a single query take nothing, and that is said (Eq. 11)."""
    assert cost(burst, cpu="0.2,0.9", slo="1000ms") == 0
    shown = capsys.readouterr().out

    assert "the CPUs cannot finish one within the SLO" in shown
    assert shown.count(" 25 ") == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"slo": "soon"}, "--slo is 'soon': expected 1ms to 86400s, such as 1s or 500ms"),
        ({"slo": "1.2.3s"}, "--slo is '1.2.3s'"),
        ({"slo": "0s"}, "--slo is '0s'"),
        ({"accelerator": "0.1"}, "--accelerator is '0.1': expected seconds a query"),
        ({"accelerator": "0,1"}, "--accelerator is '0,1'"),
        ({"cpu": "0.1,nan"}, "--cpu is '0.1,nan'"),
        ({"price": "free"}, "--price is 'free': expected a number"),
        ({"price": "0"}, "--price is '0'"),
        ({"cpu_price": "-1"}, "--cpu-price is '-1': expected a number from 0"),
        ({"devices": "1.5"}, "--devices is '1.5': expected a whole number"),
        ({"accelerator": "0.5,0.6"}, "a single query takes 1.1 s, and the SLO is 1 s"),
    ],
)
def test_flags_that_cannot_be_used(
    flags: dict[str, str], sentence: str, burst: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence names the flag, what it is and what is expected; the status is 2."""
    status = cost(burst, **flags)

    said = capsys.readouterr()
    assert (status, said.out, said.err.count("\n")) == (2, "", 1)
    assert sentence in said.err


BAD = {
    "empty": ("", "no arrival; expected a line for each"),
    "a header only": ("timestamp,queries\n", "no arrival"),
    "no object": ('{"timestamp": 1}\n\n[1]\n', "line 3: expected a JSON object"),
    "not JSON": ('{"timestamp": 1}\n{"timestamp": \n', "line 2: expected a JSON object"),
    "no time": ('{"timestamp": 1}\n{"time": 2}\n', "line 2: expected a field 'timestamp'"),
    "no column": ("time,queries\n1,1\n", "line 2: expected a field 'timestamp'"),
    "short line": ("queries,timestamp\n1,2\n1\n", "line 3: expected a field 'timestamp'"),
    "a word": ("timestamp\n1\nsoon\n", "line 3: timestamp is 'soon': expected a number or a date"),
    "a list": ('{"timestamp": [1]}\n', "line 1: timestamp is [1]: expected a number or a date"),
    "true": ('{"timestamp": true}\n', "line 1: timestamp is True"),
    "not finite": ("timestamp\nnan\n", "line 2: timestamp is 'nan'"),
    "too large": ('{"timestamp": 1' + "0" * 400 + "}\n", "line 1: timestamp is 1000"),
    "no queries": ("timestamp,queries\n1,0\n", "line 2: queries is '0': expected a whole number"),
    "half a query": ('{"timestamp": 1, "queries": 1.5}\n', "queries is 1.5"),
    "a long field": ("timestamp\n" + "1" * 200_000 + "\n", "line 2: field larger than"),
}


@pytest.mark.parametrize("case", BAD)
def test_traces_that_cannot_be_used(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence names the file, the line and what is expected."""
    text, sentence = BAD[case]
    path = tmp_path / "bad"
    path.write_text(text)

    assert cost(path) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert sentence in said
    assert str(path) in said


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    """What is not there, a directory, and bytes that are no text."""
    (tmp_path / "bytes").write_bytes(b"timestamp\n\xff\n")
    for name, sentence in (
        ("missing", "No such file or directory; expected JSON lines or CSV"),
        (".", "is no regular file"),
        ("bytes", "not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            read(tmp_path / name)


FOUND = {
    "whole numbers": ('{"timestamp": 500}\n{"timestamp": 2000}\n', "auto", True),
    "whole numbers of seconds": ("timestamp\n10\n11.5\n", "s", False),
    "fractions": ('{"timestamp": 0.5}\n{"timestamp": 2}\n', "auto", False),
    "said to be ms": ('{"timestamp": 500.0}\n{"timestamp": 2000.0}\n', "ms", False),
    "by its name": ('{"timestamp_ms": 500}\n{"timestamp_ms": 2000}\n', "auto", False),
    "columns": ("x, TIMESTAMP ,y\na,500,b\nc,2000,d\n", "auto", True),
    "a byte order mark": ("\ufefftimestamp_ms\n500\n2000\n", "auto", False),
    "dates": (
        "TIMESTAMP,Tokens\n2023-11-16 18:17:03.9799600,1\n2023-11-16 18:17:05.4799600,2\n",
        "auto",
        False,
    ),
    "dates are in no unit": (
        "timestamp\n2023-11-16T18:17:03Z\n2023-11-16 19:17:04.5+01:00\n",
        "ms",
        False,
    ),
    "out of order": ('{"timestamp": 2000}\n\n{"timestamp": 500}\n', "auto", True),
}


@pytest.mark.parametrize("case", FOUND)
def test_traces_as_they_are_found(case: str, tmp_path: Path) -> None:
    """Two queries 1.5 s apart, whatever the format, the unit and the order."""
    text, unit, guessed = FOUND[case]
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")

    found = read(path, unit)  # type: ignore[arg-type]

    assert found == RecordedLoad([0.0, pytest.approx(1.5)], [1, 1], guessed)  # type: ignore[list-item]


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 10**13), st.integers(1, 9)), min_size=1, max_size=20
    ),
    csv=st.booleans(),
)
def test_a_trace_written_is_read(
    arrivals: list[tuple[int, int]], csv: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both formats give the arrivals back, sorted, from the first one on."""
    path = tmp_path_factory.mktemp("trace") / "trace"
    rows = [f"{at},{count}" for at, count in arrivals]
    objects = [f'{{"timestamp_ms": {at}, "queries": {count}}}' for at, count in arrivals]
    path.write_text("\n".join(["timestamp_ms,queries", *rows] if csv else objects))

    found = read(path)

    first = min(at for at, _ in arrivals)
    expected = sorted(arrivals)
    assert found.times_s == [(at - first) / 1000 for at, _ in expected]
    assert found.counts == [count for _, count in expected]
