"""Readers give a document's text as people read it, with the page of every sentence."""
# ruff: noqa: RUF001 - texts of other scripts

from __future__ import annotations

import io
import textwrap
from collections import Counter
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spillway_client import Hit

from cli.files import parts
from cli.readers.page_layout import TextBox, page_lines, paragraphs
from cli.readers.pdf import read_pdf
from cli.readers.plain_text import decoded, read_plain_text
from cli.readers.reading import Reading, Textless, Unreadable, joined
from cli.readers.slides import read_slides
from cli.readers.web_page import read_web_page
from cli.readers.word_document import read_word_document
from tests.support import documents as made

# Two columns of prose: sentences long enough to be wrapped several times.
LEFT = " ".join(f"Gate {n} of the northern dam opens when the river stands high." for n in range(9))
RIGHT = " ".join(
    f"Pump {n} of the southern weir runs only while the basin is full." for n in range(9)
)
WRAPPED_LEFT, WRAPPED_RIGHT = textwrap.wrap(LEFT, 44), textwrap.wrap(RIGHT, 44)
DEJAVU = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def read(data: bytes) -> Reading:
    return read_pdf(io.BytesIO(data))


@pytest.mark.parametrize("way", ["column by column", "line by line"])
def test_two_columns(way: str) -> None:
    """Columns are read one after the other, whichever way the program wrote them; headlines above stay above."""
    by_column = made.both(made.lines(WRAPPED_LEFT), made.lines(WRAPPED_RIGHT, 310.0))
    columns = by_column if way == "column by column" else made.across(WRAPPED_LEFT, WRAPPED_RIGHT)

    assert read(made.pdf(columns)).text.replace("\n\n", " ") == f"{LEFT} {RIGHT}"
    head = made.lines(
        [
            "A headline that stands across both of the columns, from margin to margin, in one long line"
        ],
        top=810,
    )
    text = read(made.pdf(made.both(head, columns))).text
    assert text.startswith("A headline")
    assert LEFT in text
    assert RIGHT in text


def test_a_table_is_read_row_by_row() -> None:
    """Short cells side by side are rows, not columns of prose."""
    gates, widths = [f"Gate {n}" for n in range(12)], [f"{n} m" for n in range(12)]
    rows = [f"{gate}  {width}" for gate, width in zip(gates, widths, strict=True)]

    assert read(made.pdf(made.across(gates, widths))).text.split("\n") == rows


def test_paragraphs() -> None:
    """Lines of a paragraph are joined, words cut at a line's end too; short lines, gaps and items begin a new one."""
    page = made.both(
        made.lines(["The reser-", "voir is man-", "aged by a well-known team."]),
        made.lines(["Second paragraph."], top=700),
        made.lines(["1. first of all", "2. then the rest"], top=600),
    )

    assert read(made.pdf(page)).text == (
        "The reservoir is managed by a well-known team.\n\nSecond paragraph.\n\n1. first of all\n2. then the rest"
    )


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotated_pages(degrees: int) -> None:
    """Pages that are shown rotated read as others do."""
    assert read(made.pdf(made.sideways(WRAPPED_LEFT, degrees))).text == LEFT


def test_ligatures_and_fonts_of_their_own() -> None:
    """Ligatures are letters, be they glyphs or characters."""
    page = made.in_font("The o\ufb03ce \ufb01les e\ufb00ects; Größe, Łódź, ё", DEJAVU)

    assert read(made.pdf(page)).text == "The office files effects; Größe, Łódź, ё"


@pytest.mark.parametrize(
    ("font", "text"),
    [
        ("HeiseiMin-W3", "東京都の水道局は貯水池を管理する。"),
        ("STSong-Light", "北京市的水库由水务局管理。"),
        ("MSung-Light", "臺北市的水庫由水利署管理。"),
        ("HYSMyeongJo-Medium", "서울의 저수지는 수도국이 관리한다."),
    ],
)
def test_chinese_japanese_korean(font: str, text: str) -> None:
    """Fonts that are named and not embedded read as the characters they stand for."""
    assert read(made.pdf(made.in_cid_font(text, font))).text == text


def test_pages_and_running_lines() -> None:
    """Every page's start is known; headers and footers are left out; a sentence goes on over a page's end."""
    pages = [
        made.both(
            made.lines(["Annual report"], top=820),
            made.lines([f"Page {n} begins here.", f"Its secret is number {n} and it goes"]),
            made.lines([f"- {n} -"], top=30),
        )
        for n in range(1, 6)
    ]
    reading = read(made.pdf(*pages, title="The report"))

    assert reading.title == "The report"
    assert "Annual" not in reading.text
    assert "- 3 -" not in reading.text
    assert [reading.text[start:].split(" begins")[0] for start in reading.pages] == [
        f"Page {n}" for n in range(1, 6)
    ]
    assert joined(["It goes", "", "on."]) == Reading("It goes on.", "", [0, 7, 8])


def test_scans_are_named(tmp_path: Path) -> None:
    """Pages of pictures alone are a scan; a few of them among pages of text are told."""
    text = made.lines(["Some text."])
    with pytest.raises(
        Textless, match=r"a scan: 2 pages without text; recognise its text \(OCR\) first"
    ):
        read(made.pdf(made.picture(), made.picture()))
    with pytest.raises(Textless, match="1 page without text"):
        read(made.pdf(lambda _: None))

    assert read(made.pdf(text, made.picture(), text)).note == "no text on page 2: only pictures"


def test_pdfs_of_matplotlib(tmp_path: Path) -> None:
    """A plot's labels are read, those that are turned too."""
    figure, axes = plt.subplots()
    axes.set_title("Water over the dam")
    axes.set_ylabel("the highest level")
    figure.savefig(tmp_path / "plot.pdf")
    plt.close(figure)
    text = read((tmp_path / "plot.pdf").read_bytes()).text

    assert "Water over the dam" in text
    assert "the highest level" in text


def test_encrypted_and_damaged_pdfs() -> None:
    """A password, a cut file and bytes that are no PDF are told apart."""
    whole = made.pdf(made.lines(["Secret."]))
    with pytest.raises(Unreadable, match="password"):
        read(made.pdf(made.lines(["Secret."]), password="p"))
    with pytest.raises(Unreadable, match="damaged"):
        read(b"%PDF-1.7\n" + bytes(range(256)) * 4)

    assert read(whole).text == "Secret."


PIECES = st.lists(
    st.builds(
        lambda text, left, bottom, width: TextBox(text, left, bottom, left + width, bottom + 10),
        st.text("abc D.-1", min_size=1, max_size=30).filter(str.strip),
        st.floats(0, 500),
        st.floats(0, 800),
        st.floats(1, 300),
    ),
    max_size=40,
)


@given(PIECES)
def test_no_layout_loses_text(pieces: list[TextBox]) -> None:
    """Wherever pieces of text stand, each is read once."""
    pieces = [TextBox(p.text.strip(), p.left, p.bottom, p.right, p.top) for p in pieces]
    lines = page_lines(pieces)

    assert Counter(p for line in lines for p in line.pieces) == Counter(pieces)
    letters = Counter("".join(p.text for p in pieces).replace(" ", ""))
    assert Counter("".join(paragraphs(lines).split())) == letters


# -- office documents and web pages ------------------------------------------------------------------------


def test_docx() -> None:
    """Headings, lists, tables and any script come in order; the title is the document's."""
    assert read_word_document(io.BytesIO(made.docx())) == Reading(
        "# The dam\n\nThe office keeps the keys.\n\nA bold word.\n\n- one\n- two\n\nGate | Width\nNorth | 12 m\n\n"
        "## Second\n\n東京都の水道局。",
        "Of gates",
    )


def test_pptx() -> None:
    """A slide is a page: its title, its text, tables and groups, then the speaker's notes."""
    reading = read_slides(io.BytesIO(made.pptx()))

    assert reading.text == (
        "# Slide one\n\nFirst\nSecond\n\nNotes: Say it slowly.\n\n# Gates\n\nGate | Width\nNorth | 12 m\n\nIn a group"
    )
    assert [reading.text[start:].split("\n")[0] for start in reading.pages] == [
        "# Slide one",
        "# Gates",
    ]


def test_web_pages() -> None:
    """Readable text remains, with headings, lists, tables and preformatted lines; scripts and menus do not."""
    page = (
        "<title>T &amp; U</title><nav>menu</nav><script>x()</script><h1>Head</h1><p>One  two<br>three</p>"
        "<pre>a\n  b</pre><ul><li>x<li><p>y</p></ul><table><tr><th>A<td>b<tr><td>c<td><p>d</p></table>after"
    )

    assert read_web_page(page) == Reading(
        "# Head\n\nOne two\nthree\n\na\n  b\n\n- x\n- y\n\nA | b\nc | d\n\nafter", "T & U"
    )
    assert read_web_page("<p>a<script>b").text == "a"
    with pytest.raises(Textless):
        read_web_page("<script>only()</script>")


# -- encodings ---------------------------------------------------------------------------------------------

SPOKEN = {
    "German": ("Straße und Öl: die Mühle mahlt, weil das Wasser über das Wehr läuft. ", ["cp1252"]),
    "French": ("Le barrage a été rénové en été; l’eau s’écoule vers la vallée. ", ["cp1252"]),
    "Russian": (
        "Плотина была построена на реке в прошлом веке. Вода течёт через водослив. ",
        ["koi8-r", "cp1251", "cp866"],
    ),
    "Japanese": ("東京都の水道局は貯水池を管理する。この水は川から来る。", ["cp932", "euc-jp"]),
    "Chinese": ("北京市的水库由水务局管理。水从河里来，流过水闸。", ["gb18030"]),
    "Taiwanese": ("臺北市的水庫由水利署管理。水從河裡來，流過水閘。", ["big5"]),
    "Korean": ("서울의 저수지는 수도국이 관리한다. 물은 강에서 온다. ", ["cp949"]),
    "Polish": (
        "Zapora została zbudowana na rzece; woda płynie przez przelew. ",
        ["cp1250", "iso8859-2"],
    ),
    "Greek": ("Το φράγμα χτίστηκε στον ποταμό τον περασμένο αιώνα. ", ["cp1253", "iso8859-7"]),
}


@pytest.mark.parametrize("language", SPOKEN)
def test_encodings_are_found(language: str) -> None:
    """Texts of a page or less read as they were written, whatever the encoding; UTF-16 and -32 by their marks."""
    text, encodings = SPOKEN[language]
    text = text * 4
    for encoding in [*encodings, "utf-16", "utf-32"]:
        assert read_plain_text(text.encode(encoding)).text == text, encoding


def test_what_a_text_says_of_its_encoding() -> None:
    """A page, an XML file and a module say it; a false statement is not believed."""
    assert decoded('<meta charset="koi8-r">да'.encode("koi8-r")) == (
        '<meta charset="koi8-r">да',
        "koi8-r",
    )
    assert decoded("# coding: latin-1\n'é€'".encode("cp1252")) == (
        "# coding: latin-1\n'é€'",
        "cp1252",
    )
    assert decoded("<meta charset=utf-7>café".encode("cp1252"))[0].endswith("café")
    assert decoded("<meta charset=latin-1>да".encode()) == ("<meta charset=latin-1>да", "")
    with pytest.raises(Unreadable):
        decoded(bytes(range(1, 32)) * 20 + b"\x81\x8d")


# -- parts -------------------------------------------------------------------------------------------------


@given(st.lists(st.text("aé\n水 ", max_size=400), min_size=1, max_size=12), st.booleans())
def test_parts(pages: list[str], paged: bool) -> None:
    """Parts are small enough and make up the text; each character's page is known in each of them."""
    whole = joined(pages)
    if not paged:
        whole = Reading(whole.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cli.files.MAX_PART_BYTES", 256)
        items = list(parts("a.pdf", whole, {"source": "s"}))

    assert "".join(item.text for item in items) == whole.text
    assert max(len(item.text.encode()) for item in items) <= 256
    assert [item.id for item in items] == [
        "a.pdf",
        *(f"a.pdf#{n}" for n in range(2, len(items) + 1)),
    ]
    at = 0
    for item in items:
        for place in range(len(item.text)):
            page = sum(start <= at + place for start in whole.pages)
            assert Hit(item.id, 0.0, start=place, metadata=item.metadata).page == page
        at += len(item.text)
