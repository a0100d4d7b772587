"""The rows that a filter allows: kept while nothing changes, computed anew after any change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.vector_search.index.allowed_rows import AllowedRowsCache
from services.vector_search.index.rows import Flags, VectorRows


def _expected(rows: VectorRows, wanted: Flags) -> list[int]:
    view = rows.view
    return [
        row
        for row in range(view.size)
        if view.live[row] and view.numbers[row] < len(wanted) and wanted[view.numbers[row]]
    ]


@given(st.data())
def test_after_any_changes_the_rows_are_those_of_now(data: st.DataObject) -> None:
    """Rows come, die and are brought to life between searches by a few filters, asked in any order."""
    rows, cache = VectorRows(2, capacity=4), AllowedRowsCache()
    filters = [data.draw(st.lists(st.booleans(), min_size=1, max_size=12)) for _ in range(6)]
    wanted = [np.array(each) for each in filters]
    empty: list[int] = []
    for _ in range(data.draw(st.integers(1, 20))):
        doing = data.draw(st.sampled_from(("append", "kill", "append_empty", "fill", "ask", "ask")))
        size = rows.view.size
        if doing == "append":
            count = data.draw(st.integers(1, 3))
            labels = np.arange(size, size + count)
            numbers = np.array([data.draw(st.integers(0, 14)) for _ in labels])
            rows.append(np.ones((count, 2), np.float32), labels, numbers)
        elif doing == "append_empty":
            rows.append_empty(np.array([size]))
            empty.append(size)
        elif doing == "fill" and empty:
            at = empty.pop(data.draw(st.integers(0, len(empty) - 1)))
            rows.fill(np.array([at]), np.ones((1, 2), np.float32), np.array([at % 9]))
        elif doing == "kill" and size:
            rows.kill(np.array([data.draw(st.integers(0, size - 1))]))
        else:
            asked = data.draw(st.sampled_from(wanted))
            found = cache.of(rows, rows.view, asked)
            assert found.numbers.tolist() == _expected(rows, asked)
            assert found.count == len(found.numbers)
            assert np.flatnonzero(found.flags).tolist() == found.numbers.tolist()
            assert cache.of(rows, rows.view, asked) is found  # nothing changed in between
