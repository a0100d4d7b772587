"""The published tables: each equals what its JSON says, and a missing rival is never hidden."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import msgspec
import pytest

from bench import ROOT, cli, document, hot_path, report, suite
from bench.document import BenchOptions, Body, Origin, Rival
from bench.figures import overview
from bench.figures.figure import Figure

HERE = Origin("c0ffee", dirty=False)


def _body(measured: bool = True) -> Body:
    body = Body(samples={"pairs": [[1.23456789, 2.0]]}, notes=["a note"])
    body.table("Speed", ["what", "ratio"], [["batch", "1.5"]])
    body.rivals.append(Rival("hnswlib", "0.8.0", [{"ef": 32}], {"ef": 32}, measured=measured))
    body.met["(a)"] = "goal"
    return body


@pytest.mark.parametrize("page", report.pages(), ids=lambda page: page.name)
def test_docs_match_their_json(page: Path) -> None:
    """Each page of tables holds exactly what docs/benchmarks/*.json generates."""
    text = page.read_text(encoding="utf-8")

    assert report.rewrite(text) == text


def test_every_row_has_a_page_that_the_summary_links_to() -> None:
    """Each row that can be run has a page with its id, its title and its table; the summary links to the page."""
    summary = report.DOCS.read_text(encoding="utf-8")

    for name, row in suite.SUITES.items():
        text = (document.RESULTS / f"{name}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {name} {row.title}\n")
        assert f"<!-- bench:{name} -->" in text
        assert f"| [{name}](benchmarks/{name}.md) |" in summary


def test_every_figure_is_there_or_named_as_missing() -> None:
    """A row without a figure says so in its line; each check on a GPU is on the GPU page or under "Not measured"."""
    text = report.DOCS.read_text(encoding="utf-8")
    missing = text[text.index("## Not measured") : text.index("## How it is measured")]

    for name in suite.SUITES:
        begin, end = f"| [{name}](benchmarks/{name}.md) |", f"| `spillway bench {name}` |"
        (line,) = (
            line for line in text.splitlines() if line.startswith(begin) and line.endswith(end)
        )
        assert ("| not measured |" in line) != (document.RESULTS / f"{name}.json").exists()
    seen = (document.RESULTS / "GPU.md").read_text(encoding="utf-8")
    checks = {"chat", "embeddings", "engine", "falcon", "mesh", "neo", "pensieve", "windve"}
    told = {
        name for name in checks if f"python -m bench.gpu.{name} --device cuda" in missing + seen
    }
    assert told == checks
    for link in re.findall(r"\(gpu/[a-z-]+\.json\)", seen):
        assert msgspec.json.decode((document.RESULTS / link[1:-1]).read_bytes())["device"]


def test_published_json_is_complete() -> None:
    """Published results are full runs with commit, machine, versions, raw samples and (unless stale) every rival."""
    for path in document.RESULTS.glob("*.json"):
        found = msgspec.json.decode(path.read_bytes())
        assert path.stem == found["id"]
        assert found["commit"]
        assert found["machine"]["cores"]
        assert found["versions"]
        assert found["samples"]
        assert suite.missing(found) == [] or hot_path.stale(found)


def test_section_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section between its markers is replaced by the tables, whatever stood there before."""
    monkeypatch.setattr(report, "FIGURES", ())
    document.save(
        tmp_path / "V1.json", document.build("V1", "Search", _body(), BenchOptions(), HERE)
    )
    page = report.rewrite("x\n<!-- bench:V1 -->\nold\n<!-- /bench:V1 -->\ny\n", tmp_path)

    assert "old" not in page
    assert "| batch | 1.5 |" in page
    assert "| part | must | goal | ours | rival | reached |" in page
    assert "hnswlib 0.8.0: 1 settings tried, best: ef 32" in page
    assert page == report.rewrite(page, tmp_path)


def test_row_without_json_says_so(tmp_path: Path) -> None:
    """A row nobody measured says "Not measured"."""
    page = report.rewrite("<!-- bench:V1 -->\n<!-- /bench:V1 -->\n", tmp_path)

    assert "Not measured." in page


def test_document_round_trip(tmp_path: Path) -> None:
    """What is stored is read back equal, floats to seven digits."""
    found = document.build("V1", "Search", _body(), BenchOptions(seed=3), HERE)
    document.save(tmp_path / "V1.json", found)
    read = msgspec.json.decode((tmp_path / "V1.json").read_bytes())

    assert read["samples"]["pairs"] == [[1.234568, 2.0]]
    assert read["seed"] == 3
    assert found["rivals"] == read["rivals"]


@pytest.mark.parametrize(("quick", "code"), [(False, 3), (True, 0)])
def test_missing_rival_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: bool, code: int
) -> None:
    """A run without its rival exits 3 and says so, unless it was only a quick one."""
    found = document.build("V1", "Search", _body(measured=False), BenchOptions(), HERE)
    monkeypatch.setattr(suite, "run", lambda identifier, options: found)

    assert code == cli.main(["V1", *(["--quick"] if quick else [])])
    assert "hnswlib: not measured" in capsys.readouterr().err


def test_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A row that does not exist is refused with those that do."""
    assert cli.main(["Z9"]) == 2
    assert "expected one of E1" in capsys.readouterr().err


def test_changed_code_makes_a_row_stale(tmp_path: Path) -> None:
    """A row is stale once a file that it measured is another one; other files, and new bytes of data, do not count."""
    code = tmp_path / "engine" / "decoder"
    code.mkdir(parents=True)
    (code / "step.py").write_text("one")
    kept = {"paths": ["engine/decoder"], "digest": hot_path.digest(["engine/decoder"], tmp_path)}
    (code / "notes.md").write_text("no code")
    (tmp_path / "other.py").write_text("elsewhere")
    assert not hot_path.stale({"hot_path": kept}, tmp_path)
    (code / "step.py").write_text("two")
    assert hot_path.stale({"hot_path": kept}, tmp_path)
    (code / "step.py").write_text("one")
    (code / "new.cpp").write_text("")
    assert hot_path.stale({"hot_path": kept}, tmp_path)
    assert hot_path.stale({}, tmp_path)


def test_words_about_code_make_no_row_stale() -> None:
    """Comments, docstrings and blank lines may change; strings that a program uses may not."""
    before = '''
        class Lane:
            """A lane.

            Of two lines.
            """

            def name(self):  # why
                # a line of its own
                return "#1" + """
                two # lines
                """
    '''
    after = '''
        class Lane:
            """A queue of jobs."""
            def name(self):
                """Return a name."""
                return "#1" + """
                two # lines
                """  # all of it
    '''
    code, same = (hot_path.python_code(textwrap.dedent(text)) for text in (before, after))
    assert code == same
    assert code.splitlines()[-2].strip() == "two # lines"
    assert hot_path.python_code(textwrap.dedent(after).replace("two #", "three #")) != code
    assert (
        hot_path.python_code("class Lane: 'a lane'; depth = 3") == "class Lane: 'a lane'; depth = 3"
    )


def test_code_that_is_left_out_makes_no_row_stale(tmp_path: Path) -> None:
    """What stands after "!" may change; what is beside it may not; lists without it are read as ever."""
    folder = tmp_path / "services" / "router"
    (folder / "http").mkdir(parents=True)
    for name in ("app.py", "http/chat.py", "http/search.py"):
        (folder / name).write_text("one")
    whole, some = ["services/router"], ["!services/router/http/search.py", "services/router"]
    kept = [{"paths": each, "digest": hot_path.digest(each, tmp_path)} for each in (whole, some)]
    (folder / "http" / "search.py").write_text("two")
    assert [hot_path.stale({"hot_path": each}, tmp_path) for each in kept] == [True, False]
    (folder / "http" / "chat.py").write_text("two")
    assert hot_path.stale({"hot_path": kept[1]}, tmp_path)


def test_rows_of_one_kind_do_not_depend_on_files_of_another() -> None:
    """Chat does not run what searches, nor search what generates; what does both leaves nothing out."""
    search, chat = "!services/router/http/search.py", "!services/router/http/chat.py"
    assert all(search in hot_path.PATHS[row] for row in ("H1", "C1", "E1", "E2", "R1", "F2"))
    assert all(chat in hot_path.PATHS[row] for row in ("V1", "V1W", "V2", "E1", "F1"))
    for row in ("F1A", "F5", "H2", "Q1", "F6"):
        assert not any(path.startswith("!") for path in hot_path.PATHS[row])
    assert search not in hot_path.PATHS["V1"]
    assert chat not in hot_path.PATHS["H1"]


def test_paths_are_narrowed_by_the_tree_that_was_measured(tmp_path: Path) -> None:
    """In the tree of the document's own digest its row's paths of now get theirs; no other tree will do."""
    (tmp_path / "common" / "bus").mkdir(parents=True)
    (tmp_path / "common" / "bus" / "lanes.py").write_text("one")
    found = {
        "id": "R2",
        "hot_path": {"paths": ["common"], "digest": hot_path.digest(["common"], tmp_path)},
    }

    fresh = hot_path.narrowed(found, tmp_path)
    assert fresh is not None
    assert fresh["paths"] == sorted(hot_path.PATHS["R2"])
    assert not hot_path.stale({"hot_path": fresh}, tmp_path)
    (tmp_path / "common" / "other.py").write_text("two")
    assert hot_path.narrowed(found, tmp_path) is None


def test_a_row_names_the_code_that_it_measures() -> None:
    """Every row has paths, all of which are there."""
    assert set(suite.SUITES) <= set(hot_path.PATHS)
    for paths in hot_path.PATHS.values():
        assert all((ROOT / path.removeprefix("!")).exists() for path in paths)
    found = document.build("V1", "Search", _body(), BenchOptions(), HERE)
    assert not hot_path.stale(found)
    assert "**Stale**" not in report.render(found)
    assert "**Stale**" in report.render({**found, "hot_path": None})


def test_overview_has_every_row_once() -> None:
    """Each row stands in one section, with its model, whom it is against, and where it is measured."""
    lines = [line for section in overview.SECTIONS.values() for line in section]
    rows = [line.row for line in lines]

    assert set(suite.SUITES) <= set(rows)
    assert len(rows) == len(set(rows))
    assert all(all(line) for line in lines)


def test_readme_quotes_only_rows_that_are_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh row stands with model, rival, protocol and machine; a stale or incomplete one does not."""
    monkeypatch.setattr(report, "FIGURES", ())
    found = document.build("V1", "Search", _body(), BenchOptions(), HERE)
    assert overview.NO_CLAIM in report.claims(tmp_path)
    document.save(tmp_path / "V1.json", found)
    told = report.claims(tmp_path)
    assert "svs (in process)" in told
    assert f"{found['machine']['cores']} cores of" in told
    assert overview.NO_CLAIM not in told
    for wrong in ({**found, "hot_path": None}, {**found, "left": 2}):
        document.save(tmp_path / "V1.json", wrong)
        assert overview.NO_CLAIM in report.claims(tmp_path)


def test_overview_shows_the_part_that_came_out_worst() -> None:
    """Of several verdicts the lowest stands in the line, with its figure, or its name where no figure has it."""
    line = overview.SECTIONS["search"][0]
    figures = [
        Figure("V1", what, "", "", lambda _found: "it is 1.5", what) for what in ("(a)", "(b)")
    ]
    found = document.build("V1", "Search", _body(), BenchOptions(), HERE)
    worst = {**found, "met": {"(a)": "goal", "(b)": "missed"}}
    unknown = {**found, "met": {"(a)": "goal", "(c)": "missed"}, "left": 3}

    assert overview.cells(line, figures, None, stale=False)[5:7] == ["not measured", "-"]
    assert overview.cells(line, figures, worst, stale=False)[5:7] == ["(b): it is 1.5", "missed"]
    assert overview.cells(line, figures, unknown, stale=True)[5:7] == [
        "(c)", "missed, not complete, **stale**",
    ]  # fmt: skip
    some = {**worst, "notes": ["Rounds turn.", "3 of 51 cells were measured: M bf16."]}
    said = overview.cells(line, figures, some, stale=False)[5]
    assert said == "(b): it is 1.5; 3 of 51 cells were measured: M bf16"


@pytest.mark.parametrize(
    ("flags", "why"), [(["--quick"], "quick run"), ([], "uncommitted changes")]
)
def test_what_is_not_published(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], why: str
) -> None:
    """A quick run, and one of a tree with changes, is refused a place among the published ones before it begins."""
    monkeypatch.setattr(document, "origin", lambda: Origin("c0ffee", dirty=True))
    monkeypatch.setattr(suite, "run", lambda *_: pytest.fail("measured"))

    assert cli.main(["V1", "--json", str(document.RESULTS / "V1.json"), *flags]) == 2
    assert why in capsys.readouterr().err
