"""Reports as HTML: whole pages without anything outside them, plots that show what was measured, no key in them."""

from __future__ import annotations

import html
import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from bench import cli, document, report, suite
from bench.figures import targets
from bench.figures.figure import NOT_THERE, lowest
from bench.figures.html import charts, rows
from loadgen import command
from loadgen.chat.replies import Goal, Reply, summary
from loadgen.html import page, plots, runs
from loadgen.load import RequestRun, Sample

PUBLISHED = [name for name in suite.SUITES if (document.RESULTS / f"{name}.json").exists()]
SVG = "{http://www.w3.org/2000/svg}"


def _texts(svg: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(svg).iter(f"{SVG}text")]


def _whole(text: str) -> None:
    """Nothing of the page lies elsewhere, and it ends."""
    assert text.startswith("<!doctype html>")
    assert text.endswith("</html>\n")
    for sign in ("<script", "<link", "<img", 'src="', "@import", "url(http"):
        assert sign not in text


def _about() -> runs.About:
    return runs.About("python -m loadgen", "2026-01-01", {"cores": 2, "cpu": "X", "python": "3"})


def test_every_published_row_is_drawn(tmp_path: Path) -> None:
    """The report of all rows holds every table cell, verdict, note, command, date and machine of every JSON."""
    path = tmp_path / "report.html"

    assert report.main(["--html", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    _whole(text)
    shown = {""} | set(re.findall(r">([^<]+)<", text))
    for name in PUBLISHED:
        found = report.read(document.RESULTS / f"{name}.json")
        assert f'<h2 id="{name}">' in text
        assert f"spillway bench {name}" in text
        assert found["measured_at"][:10] in text
        cells = [cell for each in found["tables"] for row in each["rows"] for cell in row]
        assert [cell for cell in cells if html.escape(cell) not in shown] == []
    assert text.count("<svg") >= 20


def test_plots_show_names_and_levels() -> None:
    """A plot carries its series' names, its unit, and its must and goal; one far away is told at the edge."""
    near = plots.cdf(
        {"ours": [1, 2, 3], "empty": []}, "ms", [plots.Mark("must", 4), plots.Mark("goal", 2)]
    )
    far = plots.cdf({"ours": [1, 2, 3]}, "ms", [plots.Mark("must", 400)])
    ratio = plots.ratios([plots.Ratio("E", 1.2, 1.1, 1.3, 1.0, 1.4)], "times")

    assert {"ours", "ms", "must", "goal"} <= set(_texts(near))
    assert "empty" not in _texts(near)
    assert plots.MUST in near
    assert plots.GOAL in near
    assert any("must: 400" in text for text in _texts(far))
    assert {"E", "must", "goal"} <= set(_texts(ratio))


def test_same_samples_give_the_same_plot() -> None:
    """A report made twice is the same, byte for byte."""
    found = report.read(document.RESULTS / "F4.json")

    assert charts.of(found) == charts.of(found) != []


@pytest.mark.parametrize("samples", [[], [Sample(0.1, 0.1, 0.4, 429, "over_depth", 1)]])
def test_run_without_an_answer_has_a_report(samples: list[Sample]) -> None:
    """A run that was only refused, or did nothing, still gives a page that says so."""
    text = runs.load_page(RequestRun(samples, 1.0), 0.5, _about()).render()

    _whole(text)
    assert ("over_depth" in text) is bool(samples)


def test_load_run_is_told(tmp_path: Path) -> None:
    """Counts, percentiles, refusals by code, command and machine stand in the page of a run."""
    samples = [Sample(n / 10, n / 10, n / 10 + 0.05, 200, "", 4) for n in range(30)]
    samples += [Sample(1, 1, 1.1, 503, "no_worker", 4), Sample(2, 2, 9, 0, "client_timeout", 4)]
    made = runs.load_page(RequestRun(samples, 3.0, 0.5), 0.1, _about())
    made.save(tmp_path / "deep" / "run.html")
    text = (tmp_path / "deep" / "run.html").read_text(encoding="utf-8")

    _whole(text)
    for told in ("no_worker", "client_timeout", ">50.0<", "goodput/s", ">10.00<", "2 cores of X"):
        assert told in text
    assert text.count("<svg") == 5


def test_chat_run_is_told() -> None:
    """TTFT, TPOT, ITL and goodput of a run of streams have their curves and limits."""
    replies = [
        Reply("chat", 0, n / 5, n / 5, n / 5 + 1.0, 200, "", n / 5 + 0.2, 9, 0, 5, (0.2,) * 4)
        for n in range(10)
    ] + [Reply("chat", 0, 1.0, 1.0, 1.1, 429, "over_depth")]
    goal = Goal(0.5, 0.1)
    text = runs.chat_page(replies, summary(replies, 3.0, goal), goal, _about()).render()

    _whole(text)
    for told in (
        "TTFT within 0.5 s and TPOT within 100 ms",
        "over_depth",
        "TPOT",
        "ITL",
        "tokens a second",
    ):
        assert told in text


def test_key_stays_out_of_the_page() -> None:
    """An API key on the command line is not in the command a report shows, however it was given."""
    for argv in (["--key", "sk-1"], ["--key=sk-1"]):
        shown = runs.command(["--kind", "chat", *argv, "--rate", "2"])
        assert "sk-1" not in shown
        assert "--kind chat" in shown
        assert "--rate 2" in shown


def test_text_is_escaped() -> None:
    """What a server or a file says cannot become markup."""
    made = page.Page("<b>")
    made.text("<script>alert(1)</script>")
    made.beside([page.table(["<i>"], [["<img src=x>"]])])

    assert "<script" not in made.render()
    assert "<img" not in made.render()


def test_missing_matplotlib_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without matplotlib nothing is measured first: the command ends with a sentence."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    path = str(tmp_path / "x.html")

    assert [
        cli.main(["F4", "--html", path]),
        report.main(["--html", path]),
        command.main(["--html", path]),
    ] == [2, 2, 2]
    assert "pip install matplotlib" in capsys.readouterr().err


def test_bench_writes_a_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`spillway bench ID --html FILE` writes the page of that run."""
    found = report.read(document.RESULTS / "F4.json")
    monkeypatch.setattr(suite, "run", lambda identifier, options: found)

    assert cli.main(["F4", "--html", str(tmp_path / "f4.html")]) == 0
    text = (tmp_path / "f4.html").read_text(encoding="utf-8")
    _whole(text)
    assert "Spillway: F4" in text
    assert "0 cut short" in capsys.readouterr().out


def test_summary_has_every_row_and_its_levels() -> None:
    """Each row that can be run has a line in the summary; what is not measured says so, what is has a verdict."""
    assert {figure.row for figure in targets.FIGURES} == set(suite.SUITES)
    for figure in targets.FIGURES:
        assert figure.cells(None)[4] == "not measured"
        if figure.row in PUBLISHED:
            found = report.read(document.RESULTS / f"{figure.row}.json")
            cells = figure.cells(found)
            assert cells[4]
            met = found["met"].get(figure.met, "-") if figure.met else lowest(found)
            assert cells[6] == ("-" if cells[4] == NOT_THERE else met)


def test_quick_run_says_so() -> None:
    """A quick run's page says that its figures are not for quoting, and repeats as one."""
    found = msgspec.json.decode((document.RESULTS / "F4.json").read_bytes()) | {
        "quick": True,
        "count": 1,
    }
    text = rows.page([found]).render()

    assert "not for quoting" in text
    assert "spillway bench F4 --count 1 --quick" in text
