"""The reader of web pages: readable text with its headings, lists and tables, without scripts and navigation."""

from __future__ import annotations

import html.parser
import re

from cli.readers.reading import Reading, Textless, clean, title_in

_HIDDEN = frozenset(
    {"script", "style", "template", "noscript", "nav", "svg", "iframe", "object", "select", "button"}
)  # fmt: skip
_HEADINGS = {f"h{level}": "#" * level for level in range(1, 7)}
_BLOCKS = frozenset(
    {
        "p", "div", "section", "article", "main", "aside", "header", "footer", "ul", "ol", "dl", "table", "figure",
        "figcaption", "blockquote", "form", "hr", "address", "details", "summary", "body", "pre", *_HEADINGS,
    }
)  # fmt: skip
_LINES = frozenset({"br", "li", "tr", "dt", "dd", "caption", "option"})


def read_web_page(page: str) -> Reading:
    """Return a page's text, with headings as in Markdown; Textless if the page has no readable text."""
    parser = _PageText()
    parser.feed(page)
    parser.close()
    text = clean("".join(parser.parts))
    text = re.sub(r"[ \t\u00a0]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    if not text:
        raise Textless("a page without text")
    return Reading(text, title_in(parser.title))


class _PageText(html.parser.HTMLParser):
    """Collects the text of a page: white space outside <pre> becomes one space, blocks begin on lines of their own."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title = ""
        self._hidden: list[str] = []
        self._pre = 0
        self._in_title = False
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag in _HIDDEN:
            self._hidden.append(tag)
        self._in_title = tag == "title" and not self._hidden
        if self._hidden:
            return
        self._pre += tag == "pre"
        if tag in {"td", "th"}:
            self._next_cell()
        elif tag in {"tr", "table"}:
            self._in_cell = False
            self._break("\n")
        elif tag in _HEADINGS:
            self._break(f"\n\n{_HEADINGS[tag]} ")
        elif tag in _BLOCKS:
            self._break("\n\n")
        elif tag in _LINES:
            self._break("\n- " if tag == "li" else "\n")

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False
        if self._hidden:
            if tag in self._hidden:
                del self._hidden[self._hidden.index(tag) :]
            return
        if tag in {"td", "th", "tr", "table"}:
            self._in_cell = False
        if tag in _BLOCKS:
            self._break("\n\n")
        self._pre = max(0, self._pre - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._hidden:
            if not self._pre:
                data = re.sub(r"[ \t\r\n\f\v]+", " ", data)
                if self._last().endswith((" ", "\n")):
                    data = data.lstrip(" ")
            if data:
                self.parts.append(data)

    def _last(self) -> str:
        return self.parts[-1] if self.parts else "\n"

    def _break(self, mark: str) -> None:
        """Begin a line or a block; within a table's cell, and at the start of a list's item, only a space."""
        if not self._in_cell and self._last() != "\n- ":
            self.parts.append(mark)
        elif not self._last().endswith((" ", "\n")):
            self.parts.append(" ")

    def _next_cell(self) -> None:
        if not self._last().endswith("\n"):
            self.parts.append("| " if self._last().endswith(" ") else " | ")
        self._in_cell = True
