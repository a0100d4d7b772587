"""The BM25 index of a shard's texts, against its formula and against the documents that it belongs to."""

from __future__ import annotations

import math
import re
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from common.errors import InvalidRequest
from common.wire.search import Chunk, Document
from services.vector_search import text_index
from services.vector_search.shard import Shard
from services.vector_search.text_index import searched, words_of
from tests.support.vectors import DIMENSION, ask, settle, shard, write

WORDS = ["kiwi", "oak", "sun", "über", "x9", "zinc"]  # which stemming leaves as they are
names = st.sampled_from([f"d{i}" for i in range(8)])
sentences = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


def made(identity: str, texts: Sequence[str], n: int = 0) -> Document:
    """A document of one chunk per text."""
    text, chunks = "", []
    rng = np.random.default_rng(len(texts))
    for piece in texts:
        vector = rng.standard_normal(DIMENSION).astype("<f4").tobytes()
        chunks.append(Chunk(len(text), len(text) + len(piece), vector))
        text += piece + "; "
    return Document(id=identity, hash="h", chunks=chunks, text=text, metadata={"n": n})


def by_text(one: Shard, text: str, k: int = 50, **fields: Any) -> dict[tuple[str, int], float]:
    """The chunks found and their scores; none where there is no text to search."""
    try:
        found = one.search(ask([], k, mode="text", texts=[text], **fields))
    except InvalidRequest as error:
        if error.code != "no_texts":
            raise
        return {}
    return {(hit.id, hit.chunk): hit.score for hit in found.hits[0]}


def oracle(texts: Mapping[Any, str], query: str) -> dict[Any, float]:
    """BM25 with k1 = 1.2 and b = 0.75, of texts that hold a word of the query."""
    tokens = {key: re.findall(r"\w+", text) for key, text in texts.items() if text}
    average = sum(map(len, tokens.values())) / max(1, len(tokens))
    holding = Counter(word for held in tokens.values() for word in set(held))
    wanted = searched({word: holding[word] for word in words_of(query)}, len(tokens))
    scores: dict[Any, float] = {}
    for key, held in tokens.items():
        for word in wanted:
            often, many = held.count(word), holding[word]
            idf = max(1e-6, math.log((len(tokens) - many + 0.5) / (many + 0.5)))
            length = 1 - 0.75 + 0.75 * len(held) / average
            if often:
                score = idf * often * 2.2 / (often + 1.2 * length)
                scores[key] = scores.get(key, 0.0) + score
    return scores


@given(texts=st.lists(sentences, min_size=1, max_size=12), query=sentences)
def test_scores_are_bm25(texts: list[str], query: str) -> None:
    """Every chunk that holds a word of the query is found, with the score of the formula, best first."""
    with tempfile.TemporaryDirectory() as root:
        one = shard(Path(root))
        one.apply("1-0", write(0, [made(f"d{i}", [text]) for i, text in enumerate(texts)]))
        one.sync()
        found = by_text(one, query or "nothing")
        expected = oracle({(f"d{i}", 0): text for i, text in enumerate(texts)}, query)
        assert found == pytest.approx(expected, rel=1e-5)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        one.close()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ('a "b" AND c*', ["a", "b", "and", "c"]),
        ("text:x NEAR(y, 2) -z ^w", ["text", "x", "near", "y", "2", "z", "w"]),
        ("don't; DROP_TABLE passage", ["don", "t", "drop", "table", "passage"]),
        ("Cafe\u0301 CAFÉ", ["café"]),
        ("¿?!\x00\"'", []),
    ],
)
def test_a_query_is_words_and_no_syntax(tmp_path: Path, query: str, words: list[str]) -> None:
    """What FTS5 would read as operators is only its words, and a query without words finds nothing."""
    assert words_of(query) == words
    one = shard(tmp_path)
    one.apply("1-0", write(0, [made("a", ["CAFE\u0301 society"]), made("b", ["other"])]))
    one.sync()
    assert set(by_text(one, query)) == ({("a", 0)} if "café" in words else set())
    one.close()


def test_words_are_stemmed_and_compared_without_diacritics(tmp_path: Path) -> None:
    """`running` finds `runs`, and `uber` finds `Über`."""
    one = shard(tmp_path)
    one.apply("1-0", write(0, [made("a", ["He runs home"]), made("b", ["Über alles"])]))
    one.sync()
    assert set(by_text(one, "running")) == {("a", 0)}
    assert set(by_text(one, "uber")) == {("b", 0)}
    one.close()


@given(
    counts=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 30_000)),
    chunks=st.integers(1, 40_000),
)
def test_the_rarest_words_are_searched_for(counts: dict[str, int], chunks: int) -> None:
    """No word that is nowhere; always one of the others; no word is left out for a more common one; a bounded cost."""
    kept = searched(counts, chunks)
    known = [count for count in counts.values() if count]
    assert bool(kept) == bool(known)
    assert [counts[word] for word in kept] == sorted(known)[: len(kept)]
    assert sum(counts[word] for word in kept[1:]) <= text_index.MAX_SCORED
    if len(kept) < len(known):
        following = sorted(known)[len(kept)]
        total = sum(counts[word] for word in kept) + following
        assert 2 * following > chunks or total > text_index.MAX_SCORED


def indexed(database: Path) -> dict[int, list[str]]:
    """The words that the index of texts holds for each chunk, in their order."""
    with sqlite3.connect(database) as reader:
        reader.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, passage, 'instance')")
        found: dict[int, list[str]] = {}
        for label, word in reader.execute('SELECT doc, term FROM words ORDER BY doc, "offset"'):
            found.setdefault(label, []).append(word)
    reader.close()
    return found


def stored(database: Path) -> dict[int, list[str]]:
    """The words of the chunks that the documents hold."""
    with sqlite3.connect(database) as reader:
        rows = reader.execute(
            "SELECT c.label, substr(d.text, c.first_byte + 1, c.bytes) "
            "FROM chunk c JOIN document d ON d.number = c.document"
        ).fetchall()
    reader.close()
    words = {label: re.findall(r"\w+", (text or b"").decode()) for label, text in rows}
    return {
        label: [word.replace("ü", "u") for word in held] for label, held in words.items() if held
    }


class TextMachine(RuleBasedStateMachine):
    """A shard whose texts are searched, against a dictionary: writes, crashes and shards from before the index."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.copies = 0
        self.entries = 0
        self.one = shard(self.root / "0")
        self.held: dict[str, tuple[list[str], int]] = {}
        self.synced: dict[str, tuple[list[str], int]] = {}
        self.unsynced: list[Any] = []

    def _apply(self, change: Any) -> None:
        self.entries += 1
        self.unsynced.append((f"{self.entries}-0", change))
        assert self.one.apply(f"{self.entries}-0", change) == "applied"

    @rule(
        given=st.dictionaries(names, st.lists(sentences, min_size=1, max_size=3), min_size=1),
        n=st.integers(0, 3),
    )
    def upsert(self, given: dict[str, list[str]], n: int) -> None:
        self.held |= {name: (texts, n) for name, texts in given.items()}
        documents = [made(name, texts, n) for name, texts in given.items()]
        self._apply(write(self.entries, documents))

    @rule(ids=st.lists(names, min_size=1, max_size=4))
    def delete(self, ids: list[str]) -> None:
        for name in ids:
            self.held.pop(name, None)
        self._apply(write(self.entries, deletes=ids))

    @rule()
    def refuse(self) -> None:
        """A write of which a part does not fit takes nothing with it."""
        self.entries += 1
        bad = made("bad", ["kiwi"])
        bad = Document(
            id="bad", hash="h", chunks=bad.chunks, text=bad.text, metadata={"a": 1 << 70}
        )
        assert self.one.apply(f"{self.entries}-0", write(self.entries, [made("d0", ["oak"]), bad]))

    @rule()
    def sync(self) -> None:
        self.one.sync()
        self.synced, self.unsynced = dict(self.held), []
        self._check()

    @rule(times=st.integers(1, 3))
    def maintain(self, times: int) -> None:
        for _ in range(times):
            self.one.maintain()

    @rule()
    def settle(self) -> None:
        settle(self.one)
        self.sync()

    @rule(former=st.booleans())
    def crash(self, former: bool) -> None:
        """Open a copy of the files as they lie on the disk; `former`: as a shard from before the index of texts."""
        self.copies += 1
        here = self.root / str(self.copies)
        shutil.copytree(self.root / str(self.copies - 1), here)
        self.one.close()
        if former:
            with sqlite3.connect(here / "0" / "documents.sqlite") as database:
                database.execute("DROP TABLE passage")
                database.execute("DELETE FROM state WHERE name LIKE 'text%'")
            database.close()
        self.one = shard(here)
        for entry, change in self.unsynced:
            self.one.apply(entry, change)
        self.sync()

    def _texts(self, limit: int) -> dict[tuple[str, int], str]:
        return {
            (name, at): text
            for name, (texts, n) in self.synced.items()
            if n < limit
            for at, text in enumerate(texts)
        }

    def _check(self) -> None:
        """The index holds the words of the stored chunks and no others, and finds every chunk that holds a word."""
        if self.one.stats()["text_indexed"] < 1.0:
            return
        database = self.root / str(self.copies) / "0" / "documents.sqlite"
        assert indexed(database) == stored(database)
        everything = self._texts(9)
        for query in ("kiwi", "sun zinc"):
            scores = oracle(everything, query)
            assert by_text(self.one, query) == pytest.approx(scores, rel=1e-5)
            some = self._texts(2)
            found = by_text(self.one, query, filter={"n": {"$lt": 2}})
            assert found == pytest.approx({key: scores[key] for key in some if key in scores})
            few = by_text(self.one, query, 2, filter={"n": {"$lt": 2}})
            assert len(few) == min(2, len(found))

    def teardown(self) -> None:
        if hasattr(self, "one"):
            self.one.close()
            shutil.rmtree(self.root)


TestTextMachine = TextMachine.TestCase


def test_a_former_shard_is_indexed_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts stored before the index join it piece by piece, beside writes and deletes, and across a restart."""
    monkeypatch.setattr(text_index, "PIECE", 3)
    one = shard(tmp_path)
    one.apply("1-0", write(0, [made(f"d{i}", [f"oak {i}"]) for i in range(10)]))
    one.sync()
    one.close()
    database = tmp_path / "0" / "documents.sqlite"
    with sqlite3.connect(database) as older:
        older.execute("DROP TABLE passage")
    older.close()
    one = shard(tmp_path)
    assert one.search(ask([], 9, mode="text", texts=["oak"])).text_indexed == 0.0
    one.apply("2-0", write(1, [made("new", ["oak new"])], deletes=["d9", "d0"]))
    one.sync()
    assert set(by_text(one, "oak")) == {("new", 0)}
    one.maintain()
    assert 0.0 < one.stats()["text_indexed"] < 1.0
    one.apply("3-0", write(2, deletes=["d1"]))
    one.sync()
    one.close()
    one = shard(tmp_path)
    settle(one)
    assert one.stats()["text_indexed"] == 1.0
    assert set(by_text(one, "oak")) == {("new", 0), *((f"d{i}", 0) for i in range(2, 9))}
    assert indexed(database) == stored(database)
    one.close()
