"""The store of passages: never larger than its bound, the longest unused goes first, and its counts are right."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from engine.decoder.kv.passage_store import PassageStore

KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
CALLS = st.lists(st.tuples(st.sampled_from(["get", "put", "clear"]), KEYS, st.integers(0, 12)))


@given(most=st.integers(0, 20), calls=CALLS)
def test_it_is_a_bounded_cache_of_the_latest_used(
    most: int, calls: list[tuple[str, bytes, int]]
) -> None:
    """It answers and counts as a plain list of values does, of which the longest unused go until the bound holds."""
    store = PassageStore[bytes](most, len)
    plain: OrderedDict[bytes, bytes] = OrderedDict()
    counts = {"hits": 0, "misses": 0, "evicted": 0}

    for call, key, size in calls:
        if call == "get":
            expected = plain.get(key)
            counts["misses" if expected is None else "hits"] += 1
            if expected is not None:
                plain.move_to_end(key)
            assert store.get(key) == expected
        elif call == "put":
            plain.pop(key, None)
            if size <= most:
                while sum(map(len, plain.values())) + size > most:
                    plain.popitem(last=False)
                    counts["evicted"] += 1
                plain[key] = bytes(size)
            store.put(key, bytes(size))
        else:
            plain.clear()
            store.clear()
        assert store.bytes == sum(map(len, plain.values())) <= most
        assert len(store) == len(plain)
    assert counts == {name: getattr(store, name) for name in counts}


def test_a_store_of_no_bytes_keeps_nothing() -> None:
    """0 bytes keep no passage, so each is computed whenever it is needed."""
    store = PassageStore[bytes](0, len)
    store.put(b"a", b"x")
    assert store.get(b"a") is None
    assert (store.bytes, len(store), store.misses) == (0, 0, 1)
