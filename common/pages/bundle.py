"""The bundle format of exported pages, `spillway.pages/1`: a line of JSON that names the model, then the pages' values.

The values have the tiers' encoding (`common.pages.codec`), whose headers name page, parent and depth. The ids depend,
by `root`, on the exporting tenant; an import computes its own ids, since it knows the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from common.errors import InvalidRequest, TooLarge
from common.pages import codec
from common.pages.chain import Chain, ChainPlace
from common.pages.codec import HEADER_BYTES, Buffer, CorruptPage, Header
from common.pages.keys import GROUPS, PageKey

FORMAT = "spillway.pages/1"
MAX_HEAD_BYTES = 4096
MAX_PAGE_BYTES = 1 << 27


class BundleHeader(Struct, frozen=True):
    """The first line: the model that computed the pages, the parent of all first pages, and the number of pages."""

    format: str
    model: str
    fingerprint: str
    root: str
    pages: int = 0

    def encode(self) -> bytes:
        """Return the first line."""
        return msgspec.json.encode(self) + b"\n"


class BundleReader:
    """Reads a bundle while it arrives; InvalidRequest `invalid_pages` names the byte where it becomes invalid."""

    def __init__(self) -> None:
        self.head: BundleHeader | None = None
        self._data = bytearray()
        self._at = 0  # position in the bundle of the first byte of `_data`

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """Add bytes; yield the values that are now complete. Only their headers are checked."""
        self._data += data
        if self.head is None and not self._read_head():
            return
        while len(self._data) >= HEADER_BYTES:
            try:
                header = codec.read_header(self._data)
            except CorruptPage as error:
                raise _invalid(f"at byte {self._at}: {error}") from None
            size = header.total_bytes
            if size > MAX_PAGE_BYTES:
                raise TooLarge(
                    f"page at byte {self._at} has {size} bytes: at most {MAX_PAGE_BYTES} are allowed",
                    code="pages_too_large",
                )
            if len(self._data) < size:
                return
            yield header, bytes(self._data[:size])
            self._take(size)

    def end(self) -> None:
        """Check at the end of the bytes that the bundle is complete."""
        if self.head is None or self._data:
            raise _invalid(
                f"it ends after {self._at + len(self._data)} bytes, in the middle of a page"
            )

    def _read_head(self) -> bool:
        end = self._data.find(b"\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._data) >= MAX_HEAD_BYTES:
                raise _invalid(f"its first line has more than {MAX_HEAD_BYTES} bytes")
            return False
        try:
            head = msgspec.json.decode(self._data[:end], type=BundleHeader)
            root = bytes.fromhex(head.root)
        except (msgspec.MsgspecError, ValueError) as error:
            raise _invalid(f"its first line: {error}") from None
        if head.format != FORMAT or len(root) != 16:
            raise _invalid(
                f"its first line says {head.format[:40]!r}, root {head.root[:40]!r}; expected {FORMAT!r}"
            )
        self.head = head
        self._take(end + 1)
        return True

    def _take(self, count: int) -> None:
        del self._data[:count]
        self._at += count


def named(value: Buffer, key: PageKey, place: ChainPlace) -> bytes:
    """Return a page's value with the same layers under another id and place. Raises CorruptPage."""
    header = replace(codec.read_header(value), id=key.id, parent=place.parent, depth=place.depth)
    return codec.header_bytes(header) + memoryview(value)[HEADER_BYTES:]


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"these are no pages to import: {why}", code="invalid_pages")


class Renaming:
    """Renames pages of one chain to the ids of another chain of the same turns."""

    def __init__(self, source: Chain, target: Chain) -> None:
        self._ids = dict(zip(source.places, target.places, strict=True))
        self._places = target.places

    def __len__(self) -> int:
        return len(self._ids)

    def rename(self, header: Header, value: bytes) -> tuple[PageKey, bytes] | None:
        """Return a page under its id in the target chain; None if the source chain does not contain the page.

        CorruptPage if its bytes are damaged.
        """
        own = self._ids.get(header.id)
        if own is None or not 0 <= header.group < GROUPS:
            return None
        if bad := codec.check(value):
            raise CorruptPage(f"page {header.id.hex()}: the checksums of layers {bad} are wrong")
        key = PageKey(own, header.group)
        return key, named(value, key, self._places[own])
