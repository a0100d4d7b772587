"""One self-contained HTML page: text, tables and SVG, for a browser, a printer or an attachment."""

from __future__ import annotations

import html
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; background: #fff; margin: 2rem auto; max-width: 96rem;
  padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .5rem; padding-top: 1rem; border-top: 1px solid #d9dee6; }
h3 { font-size: 1rem; margin: 1.25rem 0 .4rem; }
p, ul { max-width: 60rem; margin: .4rem 0; }
ul { padding-left: 1.2rem; }
.muted { color: #5c6675; font-size: .87rem; }
.side { display: grid; gap: 0 2.5rem; align-items: start; grid-template-columns: minmax(0, 1fr); }
.plots { display: grid; gap: 0 2rem; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
.tables { overflow-x: auto; }
@media (min-width: 62rem) { .side.both { grid-template-columns: minmax(0, max-content) minmax(24rem, 1fr); } }
figure { margin: 0; }
figure svg { width: 100%; max-width: 38rem; height: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; margin: .3rem 0 .6rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e6eaf0; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; border-bottom: 2px solid #c5ccd6; }
th.words, td.words { text-align: left; }
pre { background: #f4f6f9; border: 1px solid #e1e6ed; border-radius: 4px; padding: .5rem .75rem; overflow-x: auto;
  font-size: .85rem; margin: .4rem 0; }
.goal { color: #17663a; } .must { color: #8a5a00; } .missed { color: #a32020; }
.goal, .must, .missed { font-weight: 600; }
"""
_WORDS = {"goal": "goal", "met": "goal", "must": "must", "missed": "missed"}


class Page:
    """Gathers parts in order; all text is escaped."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]

    def heading(self, text: str, anchor: str = "") -> None:
        """Begin a section with the link `#anchor`."""
        name = f' id="{html.escape(anchor)}"' if anchor else ""
        self._parts.append(f"<h2{name}>{html.escape(text)}</h2>")

    def text(self, text: str, *, muted: bool = False) -> None:
        """Add a paragraph."""
        kind = ' class="muted"' if muted else ""
        self._parts.append(f"<p{kind}>{html.escape(text)}</p>")

    def points(self, lines: Sequence[str]) -> None:
        """Add a list."""
        if lines:
            items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
            self._parts.append(f'<ul class="muted">{items}</ul>')

    def command(self, line: str) -> None:
        """Add the command that repeats the measurement above it."""
        self._parts.append(f"<pre>{html.escape(line)}</pre>")

    def verdicts(self, met: dict[str, str]) -> None:
        """Add sentences about the levels that were reached."""
        told = (
            f'{html.escape(what)}: <span class="{_WORDS.get(word, "")}">{html.escape(word)}</span>'
            for what, word in met.items()
        )
        self._parts.append(f"<p>{' · '.join(told)}</p>")

    def beside(self, tables: Sequence[str], plots: Sequence[str] = ()) -> None:
        """Put tables (made by `table`) to the left of plots (made by `figure`); on a narrow screen above these."""
        left = f'<div class="tables">{"".join(tables)}</div>'
        right = f'<div class="plots">{"".join(plots)}</div>' if plots else ""
        kind = "side both" if plots else "side"
        self._parts.append(f'<div class="{kind}">{left}{right}</div>')

    def render(self) -> str:
        """Return the whole page."""
        head = f'<meta charset="utf-8"><title>{html.escape(self._title)}</title>'
        view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
        body = "\n".join(self._parts)
        top = f'<!doctype html>\n<html lang="en"><head>{head}{view}<style>{_STYLE}</style></head>'
        return f"{top}\n<body>\n{body}\n</body></html>\n"

    def save(self, path: Path) -> None:
        """Write the page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.render(), encoding="utf-8")


def can_plot() -> bool:
    """Return whether plots can be drawn; if not, print the missing package."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    print("--html needs matplotlib: pip install matplotlib", file=sys.stderr)
    return False


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Return a table; a column with a cell that begins with a letter counts as words, and levels have their colours."""
    words = [any(row[i][:1].isalpha() for row in rows) for i in range(len(columns))]
    kinds = [' class="words"' if word else "" for word in words]
    head = "".join(
        f"<th{kind}>{html.escape(n)}</th>" for kind, n in zip(kinds, columns, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    above = f"<h3>{html.escape(title)}</h3>" if title else ""
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def figure(title: str, svg: str) -> str:
    """Return a plot under its title."""
    return f"<figure><h3>{html.escape(title)}</h3>{svg}</figure>"


def machine(found: dict[str, Any]) -> str:
    """Return the machine of a document in words."""
    memory = found.get("memory_bytes", 0) / 2**30
    return f"{found['cores']} cores of {found['cpu']}, {memory:.0f} GiB, Python {found['python']}"


def _cell(text: str, kind: str) -> str:
    if text in _WORDS:
        return f'<td{kind}><span class="{_WORDS[text]}">{text}</span></td>'
    return f"<td{kind}>{html.escape(text)}</td>"
