"""Archives of office documents: zip files whose declared size is bounded before anything is unpacked."""

from __future__ import annotations

import xml.etree.ElementTree as ET
import zipfile
from typing import BinaryIO

from cli.readers.reading import Unreadable

MAX_UNPACKED_BYTES = 256 * 1024 * 1024
MAX_ENTRIES = 20_000
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"


def opened(file: BinaryIO, needed: str) -> zipfile.ZipFile:
    """Return the archive; Unreadable if it is no zip file, lacks the entry `needed`, is encrypted or too large.

    `zipfile` never unpacks more of an entry than the size declared here.
    """
    begins = file.read(8)
    file.seek(0)
    if begins == _OLE:
        raise Unreadable("encrypted, or a format from before 2007: save it anew without a password")
    try:
        archive = zipfile.ZipFile(file)
        entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise Unreadable("damaged: not a whole zip archive") from error
    size = sum(entry.file_size for entry in entries)
    if len(entries) > MAX_ENTRIES or size > MAX_UNPACKED_BYTES:
        raise Unreadable(
            f"it would unpack to {size:,} bytes in {len(entries):,} entries; at most"
            f" {MAX_UNPACKED_BYTES:,} in {MAX_ENTRIES:,} are read"
        )
    if any(entry.flag_bits & 1 for entry in entries):
        raise Unreadable("encrypted: it takes a password to read it")
    if needed not in archive.namelist():
        raise Unreadable(f"damaged: it lacks {needed}")
    return archive


def tree(archive: zipfile.ZipFile, name: str) -> ET.Element:
    """Return an entry's XML; Unreadable if it declares a document type, which could define entities.

    KeyError if there is no such entry, ParseError or BadZipFile if it is damaged.
    """
    data = archive.read(name)
    if b"<!DOCTYPE" in data:
        raise Unreadable(f"{name} declares a document type, which office documents never do")
    return ET.fromstring(data)  # noqa: S314 - no document type, so no entity
