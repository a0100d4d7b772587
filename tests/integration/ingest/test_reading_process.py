"""Documents are read in a process of their own: hostile ones are named, bounded in time and memory, and stop none."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.files import Found, Item, Problem, Root
from cli.readers import archive
from cli.readers.pdf import read_pdf
from cli.readers.reading import MAX_PAGES
from cli.reading_process import ReadingProcess
from tests.support import documents as made

MEMORY_BYTES = 256 * 1024 * 1024
W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
GOOD = made.pdf(made.lines(["The good one is read."]))


@pytest.fixture
def reader() -> Iterator[ReadingProcess]:
    with ReadingProcess(memory_bytes=MEMORY_BYTES) as made_reader:
        yield made_reader


def found(folder: Path, reader: ReadingProcess) -> dict[str, Found]:
    return {item.id: item for item in Root(folder, "s", reader=reader).documents()}


def raw_pdf(*objects: bytes) -> bytes:
    """Return a PDF of these objects, numbered from 1, the first one its catalogue."""
    out, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        start,
    )
    return bytes(out)


def many_pages(count: int) -> bytes:
    kids = b" ".join(b"%d 0 R" % (3 + n) for n in range(count))
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] >>"
    return raw_pdf(
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%b] >>" % (count, kids),
        *[page] * count,
    )


def pages_in_a_circle() -> bytes:
    return raw_pdf(
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count 3 /Kids [2 0 R 2 0 R 2 0 R] >>",
    )


def page_that_unpacks(size: int) -> bytes:
    """Return a PDF whose page is `size` bytes of drawing, packed twice."""
    packed = zlib.compress(zlib.compress(b"q Q " * (size // 4), 9), 9)
    return raw_pdf(
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>",
        b"<< /Length %d /Filter [/FlateDecode /FlateDecode] >>\nstream\n%b\nendstream"
        % (len(packed), packed),
    )


def with_body(body: bytes, before: bytes = b"") -> bytes:
    """Return a DOCX whose document is this XML."""
    xml = b'<?xml version="1.0"?>%b<w:document xmlns:w="%b"><w:body>%b</w:body></w:document>'
    whole = xml % (before, W.encode(), body)
    return made.replaced(made.docx(), "word/document.xml", lambda _: whole)


def laughs() -> bytes:
    """Return a DOCX whose text would be a billion words, by entities of entities."""
    entities = [b'<!ENTITY e0 "ha">']
    entities += [b'<!ENTITY e%d "%b">' % (n, b"&e%d;" % (n - 1) * 10) for n in range(1, 10)]
    doctype = b"<!DOCTYPE d [%b]>" % b"".join(entities)
    return with_body(b"<w:p><w:r><w:t>&e9;</w:t></w:r></w:p>", doctype)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "bomb.docx": (
        lambda: made.replaced(
            made.docx(), "word/media/a.bin", lambda _: bytes(archive.MAX_UNPACKED_BYTES)
        ),
        "it would unpack to",
    ),
    "bomb.pptx": (
        lambda: made.archive({f"{n}": b"" for n in range(archive.MAX_ENTRIES + 1)}),
        "entries; at most",
    ),
    "wide.docx": (
        lambda: with_body(b"<w:p><w:r><w:t>x</w:t></w:r></w:p>" * 150_000),
        "takes more memory than is allowed",
    ),
    "deep.docx": (lambda: with_body(b"<w:tbl><w:tr><w:tc>" * 50_000), "nested too deeply|damaged"),
    "entities.docx": (laughs, "damaged|document type|memory"),
    "old.docx": (lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512), "encrypted"),
    "cut.docx": (lambda: made.docx()[:-200], "not a whole zip archive"),
    "empty.docx": (lambda: made.archive({"a": b"\0"}), "it lacks word/document.xml"),
    "slideless.pptx": (
        lambda: made.replaced(made.pptx(), "ppt/_rels/presentation.xml.rels", lambda _: b"<a/>"),
        "a damaged presentation",
    ),
    "pages.pdf": (lambda: many_pages(10_000), f"10,000 pages; at most {MAX_PAGES:,} are read"),
    "circle.pdf": (pages_in_a_circle, "without text|damaged"),
    "unpacks.pdf": (
        lambda: page_that_unpacks(2**28),
        "memory|without text|damaged",
    ),
    "locked.pdf": (lambda: made.pdf(made.lines(["x"]), password="p"), "it takes a password"),
    "cut.pdf": (lambda: GOOD[:200], "a damaged PDF"),
    "noise.pdf": (lambda: b"%PDF-1.4\n" + os.urandom(5000), "a damaged PDF"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_are_named(name: str, tmp_path: Path, reader: ReadingProcess) -> None:
    """Each fails by name with the reason, and the file after it is read."""
    make, reason = HOSTILE[name]
    (tmp_path / name).write_bytes(make())
    (tmp_path / "z.pdf").write_bytes(GOOD)
    items = found(tmp_path, reader)
    problem, good = items[name], items["z.pdf"]

    assert isinstance(problem, Problem)
    assert any(part in problem.reason for part in reason.split("|")), problem.reason
    assert isinstance(good, Item)
    assert good.text == "The good one is read."


def test_every_kind_is_read_there(tmp_path: Path, reader: ReadingProcess) -> None:
    """A folder of every format and encoding becomes documents with titles, sizes, pages and encodings."""
    files = {
        "a.docx": made.docx(),
        "b.pptx": made.pptx(),
        "c.pdf": made.pdf(made.lines(["First page."]), made.lines(["Second page."]), title="Pages"),
        "d.html": "<meta charset=cp1252><title>Café</title><p>Été".encode("cp1252"),
        "e.txt": "Die Mühle mahlt, weil das Wasser über das Wehr läuft.".encode("cp1252"),
        "f.md": b"# Plain\n\ntext",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    items = found(tmp_path, reader)
    told = {name: item.metadata for name, item in items.items() if isinstance(item, Item)}

    assert list(told) == list(files)
    assert {name: one["title"] for name, one in told.items()} == {
        "a.docx": "Of gates",
        "b.pptx": "Slide one",
        "c.pdf": "Pages",
        "d.html": "Café",
        "e.txt": "e.txt",
        "f.md": "Plain",
    }
    assert {name: one["size"] for name, one in told.items()} == {
        n: len(d) for n, d in files.items()
    }
    assert [told["c.pdf"][name] for name in ("first_page", "pages")] == [1, [0, 13]]
    assert {name: one["encoding"] for name, one in told.items() if "encoding" in one} == {
        "d.html": "cp1252",
        "e.txt": "windows-1252",
    }


def test_what_documents_refer_to_is_not_fetched(tmp_path: Path, reader: ReadingProcess) -> None:
    """Pictures, templates and entities elsewhere are left where they are: no server is asked, no file is opened."""
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a.png"
        asked = f'<!DOCTYPE d [<!ENTITY s SYSTEM "{secret.as_uri()}"><!ENTITY u SYSTEM "{url}">]>'
        body = b"<w:p><w:r><w:t>&s;&u;</w:t></w:r></w:p>"
        folder = tmp_path / "in"
        folder.mkdir()
        (folder / "entities.docx").write_bytes(with_body(body, asked.encode()))
        link = f'<Relationship Id="rId99" TargetMode="External" Target="{url}" Type="{W}/image"/></Relationships>'
        drawing = (
            b'<w:p><w:r><w:t>Shown.</w:t></w:r><w:r><w:drawing><wp:inline xmlns:wp="http://schemas.openxmlformats.org/'
            b'drawingml/2006/wordprocessingDrawing"><a:graphic xmlns:a="http://schemas.openxmlformats.org/drawingml/'
            b'2006/main"><a:graphicData><pic:pic xmlns:pic="http://schemas.openxmlformats.org/drawingml/2006/picture">'
            b'<pic:blipFill><a:blip xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships" '
            b'r:link="rId99"/></pic:blipFill></pic:pic></a:graphicData></a:graphic></wp:inline></w:drawing></w:r></w:p>'
        )
        linked = made.replaced(
            with_body(drawing),
            "word/_rels/document.xml.rels",
            lambda rels: rels.replace(b"</Relationships>", link.encode()),
        )
        (folder / "linked.docx").write_bytes(linked)
        (folder / "page.html").write_text(
            f"<p>Shown.</p><img src='{url}'><iframe src='{url}'></iframe>"
        )
        items = found(folder, reader)
        with pytest.raises(BlockingIOError):
            server.accept()

    assert all("the secret" not in getattr(item, "text", "") for item in items.values())
    shown = [items[name] for name in ("linked.docx", "page.html")]
    assert [getattr(item, "text", item) for item in shown] == ["Shown.", "Shown."]


class Clock:
    """A clock that is given its readings; the last one stays."""

    def __init__(self) -> None:
        self.readings = [0.0]

    def __call__(self) -> float:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


def test_a_reader_that_hangs_is_replaced(tmp_path: Path) -> None:
    """A file that takes too long is named; the process that read it is gone, and the next file meets another one."""
    clock = Clock()
    late = Problem("a.pdf", "not read within 30 s (--file-timeout)")
    (tmp_path / "a.pdf").write_bytes(GOOD)
    with ReadingProcess(limit_s=30.0, clock=clock) as reader:
        clock.readings = [0.0, 31.0]
        assert found(tmp_path, reader)["a.pdf"] == late
        clock.readings = [0.0]
        assert isinstance(found(tmp_path, reader)["a.pdf"], Item)
        child = reader.pid
        assert child is not None
        os.kill(child, signal.SIGSTOP)
        clock.readings = [0.0, 0.0, 29.9, 31.0]
        assert found(tmp_path, reader)["a.pdf"] == late
        clock.readings = [0.0]
        assert isinstance(found(tmp_path, reader)["a.pdf"], Item)
        assert reader.pid not in {None, child}

    assert reader.pid is None


def test_a_reader_that_dies_is_replaced(tmp_path: Path, reader: ReadingProcess) -> None:
    """A document whose reading ends the process is named, and the run goes on."""
    (tmp_path / "a.pdf").write_bytes(GOOD)
    assert isinstance(found(tmp_path, reader)["a.pdf"], Item)
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGSTOP)
    stopped = reader.pid
    killer = threading.Timer(0.2, os.kill, (stopped, signal.SIGKILL))
    killer.start()
    dead = found(tmp_path, reader)["a.pdf"]
    killer.join()

    assert dead == Problem(
        "a.pdf", "damaged, or it takes more memory than is allowed: the process that read it ended"
    )
    assert isinstance(found(tmp_path, reader)["a.pdf"], Item)


def test_a_reader_without_a_command_ends(tmp_path: Path) -> None:
    """The process ends when the command that began it is gone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [str(theirs.fileno()), str(MEMORY_BYTES), "30"]
        child = subprocess.Popen(
            [sys.executable, "-m", "cli.readers", *words], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.close()

        assert child.wait(60) == 0


def test_what_chromium_prints(tmp_path: Path) -> None:
    """A printed page reads as it was written: two columns, then a table."""
    left = " ".join(
        f"Gate {n} of the northern dam opens when the river stands high." for n in range(9)
    )
    right = " ".join(
        f"Pump {n} of the southern weir runs while the basin is full." for n in range(9)
    )
    page = (
        "<h1>The flow office</h1><div style='column-count: 2'>"
        f"<p>{left}</p><p>{right}</p></div><table><tr><td>Ada</td><td>12</td></tr></table>"
    )
    text = read_pdf(io.BytesIO(made.printed(page, tmp_path))).text

    assert text.startswith("The flow office\n\n")
    assert left in text
    assert right in text
    assert "Ada" in text
