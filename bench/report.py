"""Write the tables of docs/benchmarks.md and docs/benchmarks/*.md from the JSON of the runs.

`--check` only compares; `--html` draws the tables with plots.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench import ROOT
from bench.document import RESULTS
from bench.figures import overview
from bench.figures.figure import Figure
from bench.figures.targets import COLUMNS, FIGURES
from bench.hot_path import stale
from bench.suite import SUITES
from loadgen.html.page import can_plot

DOCS, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
_BAD = (LookupError, TypeError, AttributeError, ValueError, RecursionError)
_SECTION = re.compile(r"(<!-- bench:(?P<id>\w+) -->\n)(?P<body>.*?)(<!-- /bench:(?P=id) -->)", re.S)


class ReportError(Exception):
    """A result file cannot be used; the message names it and what is expected."""


def render(found: dict[str, Any]) -> str:
    """Return one document's tables, verdicts, notes and origin as Markdown."""
    parts = []
    for table in found["tables"]:
        if table["title"]:
            parts.append(f"**{table['title']}**\n")
        parts += [_line(table["columns"]), _line(["---"] * len(table["columns"]))]
        parts += [_line(row) for row in table["rows"]]
        parts.append("")
    if found["met"]:
        parts.append(
            "; ".join(f"{what}: **{word}**" for what, word in found["met"].items()) + ".\n"
        )
    parts += [f"- {note}" for note in found["notes"]]
    parts += [""] if found["notes"] else []
    parts += [f"- {_rival(rival)}" for rival in found["rivals"]]
    parts += [""] if found["rivals"] else []
    return "\n".join(parts) + _origin(found) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rival(rival: dict[str, Any]) -> str:
    if not rival["measured"]:
        return f"{rival['name']}: not measured"
    best = ", ".join(f"{name} {value}" for name, value in rival["best"].items())
    tried = len(rival["settings_tried"])
    return f"{rival['name']} {rival['version']}: {tried} settings tried, best: {best}"


def _origin(found: dict[str, Any]) -> str:
    box = found["machine"]
    state = " with uncommitted changes" if found["dirty"] else ""
    quick = " (quick run: not for quoting)" if found["quick"] else ""
    changed = (
        " **Stale**: the code that this row measures has changed since." if stale(found) else ""
    )
    left = f" Not complete: {found['left']} cells are left." if found.get("left") else ""
    return (
        f"Measured {found['measured_at'][:10]} at commit `{found['commit'][:12]}`{state} on "
        f"{box['cores']} cores of {box['cpu']}, Python {box['python']}; raw samples: "
        f"[`{found['id']}.json`]({found['id']}.json), repeat with "
        f"`spillway bench {found['id']}`.{quick}{left}{changed}\n"
    )


def read(path: Path) -> dict[str, Any]:
    """Return a stored document; ReportError if it is none."""
    try:
        if not path.is_file():
            raise ReportError(f"{path}: expected a regular file")
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}; expected a file") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _unusable(path, error) from error
    return found


def summary(section: str, results: Path = RESULTS) -> str:
    """Return a section's table of the page that comes first: one line for each of its rows that can be run."""
    lines = [_line(list(overview.COLUMNS)), _line(["---"] * len(overview.COLUMNS))]
    for each in overview.SECTIONS[section]:
        if each.row in SUITES:
            path = results / f"{each.row}.json"
            found = read(path) if path.exists() else None
            try:
                old = found is not None and stale(found)
                lines.append(_line(overview.cells(each, _figures(each.row), found, stale=old)))
            except _BAD as error:
                raise _unusable(path, error) from error
    return "\n".join(lines) + "\n"


def claims(results: Path = RESULTS) -> str:
    """Return what the README may say of speed: the lines of its rows that are fresh and complete, or that none is."""
    lines = []
    for row in overview.README:
        path = results / f"{row}.json"
        found = read(path) if path.exists() else None
        if found is not None and not stale(found) and not found.get("left"):
            try:
                lines.append(_line(overview.claim(row, _figures(row), found)))
            except _BAD as error:
                raise _unusable(path, error) from error
    if not lines:
        return f"{overview.NO_CLAIM}\n"
    head = [_line(list(overview.CLAIM)), _line(["---"] * len(overview.CLAIM))]
    return "\n".join([*head, *lines, "", overview.ALL_CLAIMS]) + "\n"


def parts(row: str, found: dict[str, Any] | None) -> str:
    """Return the table of a row's parts that are judged: must, goal, ours, the rival's, and the level reached."""
    lines = [_line(list(COLUMNS[1:])), _line(["---"] * len(COLUMNS[1:]))]
    lines += [_line(figure.cells(found)[1:]) for figure in _figures(row)]
    return "\n".join(lines) + "\n"


def _figures(row: str) -> list[Figure]:
    return [figure for figure in FIGURES if figure.row == row]


def pages() -> list[Path]:
    """Return the pages with generated tables: the summary first, then the README's, then one page a row."""
    return [DOCS, README, *sorted(RESULTS.glob("*.md"))]


def rewrite(text: str, results: Path = RESULTS) -> str:
    """Return the page with every marked section generated anew; a row without JSON says so."""

    def section(match: re.Match[str]) -> str:
        _, summarised, name = match["id"].partition("summary_")
        if summarised:
            return f"{match[1]}\n{summary(name, results)}\n{match[4]}"
        if match["id"] == "readme":
            return f"{match[1]}\n{claims(results)}\n{match[4]}"
        path = results / f"{match['id']}.json"
        if not path.exists():
            return f"{match[1]}\nNot measured.\n\n{parts(match['id'], None)}\n{match[4]}"
        found = read(path)
        try:
            body = f"{parts(match['id'], found)}\n{render(found)}"
        except _BAD as error:
            raise _unusable(path, error) from error
        return f"{match[1]}\n{body}\n{match[4]}"

    return _SECTION.sub(section, text)


def _unusable(path: Path, error: Exception) -> ReportError:
    why = f"{type(error).__name__} {str(error)[:200]}"
    return ReportError(f"{path}: {why}; expected what `spillway bench --json` writes")


def _html(path: Path) -> int:
    """Write the report of every row that has been measured."""
    if not can_plot():
        return 2
    from bench.figures.html import rows  # noqa: PLC0415 - only reports need what plots need

    measured = [RESULTS / f"{name}.json" for name in SUITES]
    try:
        found = [read(each) for each in measured if each.exists()]
        rows.page(found).save(path)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def main(argv: list[str] | None = None) -> int:
    """Rewrite the pages, or with `--check` return 1 if one does not match its JSON."""
    parser = argparse.ArgumentParser("python -m bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if it differs")
    parser.add_argument("--html", type=Path, help="write a report of all rows, with plots, here")
    args = parser.parse_args(argv)
    check = args.check
    if args.html:
        return _html(args.html)
    before = {page: page.read_text(encoding="utf-8") for page in pages()}
    try:
        after = {page: rewrite(text) for page, text in before.items()}
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    changed = [page for page in before if before[page] != after[page]]
    for page in changed:
        if check:
            print(f"{page.relative_to(ROOT)} does not match its JSON", file=sys.stderr)
        else:
            page.write_text(after[page], encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
