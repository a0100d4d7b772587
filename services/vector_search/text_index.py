"""BM25 over the texts of a shard's chunks: an FTS5 table in the database of its documents, changed in their
transactions, so a crash or a refused write leaves both equal.

The table stores no text: a chunk's text is a piece of its document's, and the caller gives it again to remove the
chunk. Words are stemmed as English, and compared without case and diacritics. Text without spaces counts as one word.
"""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from services.vector_search.index.rows import Flags, Floats, Ints

# The defaults `detail=full` and `columnsize=1` keep a word's count in a text and the text's length, for BM25.
_TABLE = (
    "CREATE VIRTUAL TABLE passage USING fts5"
    "(text, content='', tokenize='porter unicode61 remove_diacritics 2')"
)
_OLDER = """
SELECT c.label, substr(d.text, c.first_byte + 1, c.bytes)
FROM chunk c JOIN document d ON d.number = c.document
WHERE c.label > ? AND c.label < ? ORDER BY c.label LIMIT ?
"""
_BEST = (
    "SELECT rowid, bm25(passage) AS cost FROM passage WHERE passage MATCH ? ORDER BY cost, rowid"
)
_WORD = re.compile(r"[^\W_]+")
MAX_WORDS = 64
MAX_SCORED = 20_000  # chunks times words; scoring one takes about a microsecond
PIECE = 1000
_BATCH = 1024
_COUNTS_KEPT = 4096  # words with counts in memory
_COUNTS_AGE = 1 / 16  # counts are read again after the shard's size changed by this share
_COUNTED_ANEW = 1000  # a shard with fewer chunks counts words at each search


class TextMatches(NamedTuple):
    """The chunks of one query, best first, and their BM25 scores: higher is better."""

    labels: Ints
    scores: Floats


def words_of(text: str) -> list[str]:
    """Return the different words of a query in their order, at most MAX_WORDS, without anything FTS5 could parse."""
    found = _WORD.findall(unicodedata.normalize("NFC", text).lower())
    return list(dict.fromkeys(found))[:MAX_WORDS]


def searched(counts: Mapping[str, int], texts: int) -> list[str]:
    """Return the words to search for, the rarest first; each word occurs in `counts` of the `texts` texts.

    Words in more than half of the texts are left out, as BM25 gives them no weight, and so are words after which more
    than MAX_SCORED matches would have to be scored. The rarest word that occurs always stays.
    """
    known = sorted((word for word, count in counts.items() if count), key=counts.__getitem__)
    kept: list[str] = []
    scored = 0
    for word in known:
        scored += counts[word]
        if kept and (2 * counts[word] > texts or scored > MAX_SCORED):
            break
        kept.append(word)
    return kept


class TextIndex:
    """The index of one database's texts: `writer` changes it in the caller's transactions, `reader` lends connections.

    A database from before this index has `pending` chunks, which `build` adds in pieces.
    """

    def __init__(
        self,
        writer: sqlite3.Connection,
        reader: Callable[[], AbstractContextManager[sqlite3.Connection]],
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._counts: dict[str, int] = {}
        self._counted = 0  # the number of chunks when counting began
        self.count = 0  # texts at the last count, about; 0 only if there are none
        self._create()
        self.load()

    def _create(self) -> None:
        known = self._writer.execute("SELECT 1 FROM sqlite_master WHERE name = 'passage'")
        if known.fetchone():
            return
        self._writer.execute("BEGIN IMMEDIATE")
        last = self._writer.execute("SELECT max(label) FROM chunk").fetchone()[0]
        self._writer.execute(_TABLE)
        if last is not None:
            rows = [("text_done", 0), ("text_last", last)]
            self._writer.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", rows)
        self._writer.execute("COMMIT")

    def load(self) -> None:
        """Read again how many older chunks have been added, as after a rollback."""
        rows = self._writer.execute(
            "SELECT name, value FROM state WHERE name IN ('text_done', 'text_last')"
        )
        state = dict(rows.fetchall())
        self._done: int = state.get("text_done", 0)
        self._last: int = state.get("text_last", 0)

    # -- writing

    def add(self, texts: Iterable[tuple[int, str]]) -> None:
        """Add new chunks by label in the open transaction."""
        self._writer.executemany(
            "INSERT INTO passage (rowid, text) VALUES (?, ?)", [row for row in texts if row[1]]
        )

    def remove(self, texts: Iterable[tuple[int, str]]) -> None:
        """Remove chunks, with the texts that they were added with, in the open transaction."""
        self._writer.executemany(
            "INSERT INTO passage (passage, rowid, text) VALUES ('delete', ?, ?)",
            [row for row in texts if row[1] and not self._done < row[0] <= self._last],
        )

    @property
    def pending(self) -> int:
        """The number of older labels that `build` has not passed yet."""
        return self._last - self._done

    @property
    def share(self) -> float:
        """The share of the older chunks that have been added."""
        return self._done / self._last if self._last else 1.0

    def build(self) -> None:
        """Add a piece of the older chunks, in a transaction of its own."""
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            rows = self._writer.execute(_OLDER, (self._done, self._last + 1, PIECE)).fetchall()
            done = rows[-1][0] if len(rows) == PIECE else self._last
            self.add((label, text.decode()) for label, text in rows if text)
            self._writer.execute("UPDATE state SET value=? WHERE name='text_done'", (done,))
            self._writer.execute("COMMIT")
        except sqlite3.Error:
            self._writer.execute("ROLLBACK")
            raise
        self._done = done

    # -- reading

    def search(
        self, text: str, most: int, chunks: int, keep: Callable[[Ints], Flags] | None = None
    ) -> TextMatches:
        """Return up to `most` chunks that hold a word of the text; the shard has about `chunks` chunks.

        `keep` returns a flag for each label, True for those to return; it is called once the database's state is fixed.
        """
        with self._reader() as reader:
            return self._searched(reader, text, most, chunks, keep)

    def _searched(
        self,
        reader: sqlite3.Connection,
        text: str,
        most: int,
        chunks: int,
        keep: Callable[[Ints], Flags] | None,
    ) -> TextMatches:
        counts = self._counts_of(reader, words_of(text), chunks)
        words = searched(counts, self.count)
        match = " OR ".join(f'"{word}"' for word in words)
        labels: list[int] = []
        scores: list[float] = []
        if not match:
            return _matches(labels, scores)
        if keep is None:
            found = reader.execute(f"{_BEST} LIMIT ?", (match, most)).fetchall()
            return _matches([row[0] for row in found], [-row[1] for row in found])
        rows = reader.execute(_BEST, (match,))
        try:
            while len(labels) < most and (part := rows.fetchmany(_BATCH)):
                good = np.flatnonzero(keep(np.array([row[0] for row in part], np.int64)))
                labels += [part[at][0] for at in good]
                scores += [-part[at][1] for at in good]
        finally:
            rows.close()
        return _matches(labels[:most], scores[:most])

    def _counts_of(
        self, reader: sqlite3.Connection, words: Sequence[str], chunks: int
    ) -> dict[str, int]:
        """Return about how many chunks hold each word; a large shard keeps the counts until its size changes."""
        changed = abs(chunks - self._counted) > _COUNTS_AGE * self._counted
        full = len(self._counts) > _COUNTS_KEPT
        if changed or full or not self.count or chunks < _COUNTED_ANEW:
            self._counts, self._counted = {}, chunks
            query = "SELECT count(*) FROM passage_docsize"
            self.count = reader.execute(query).fetchone()[0]
        kept = self._counts
        found: dict[str, int] = {}
        for word in words:
            count = kept.get(word)
            if not count:  # a word without texts may have got some since
                query = "SELECT count(*) FROM passage WHERE passage MATCH ?"
                count = kept[word] = reader.execute(query, (f'"{word}"',)).fetchone()[0]
            found[word] = count
        return found


def _matches(labels: Sequence[int], scores: Sequence[float]) -> TextMatches:
    return TextMatches(np.array(labels, np.int64), np.array(scores, np.float32))
