"""A cache of the documents that recent filters match, updated as documents come: a repeated filter needs no SQL."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from services.vector_search.documents import Documents
from services.vector_search.filters import Attributes, Filter
from services.vector_search.index.rows import Flags

_KEPT = 64
_TRIES = 3


class FilterMasks:
    """For each recent filter, a flag per document number. A deleted document's flag may stay, as its rows are dead."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._lock = threading.Lock()
        self._version = 0
        self._kept: OrderedDict[bytes, tuple[Filter, Flags]] = OrderedDict()

    def get(self, condition: Filter) -> Flags:
        """Return a flag for each document number, True if the filter matches the document."""
        with self._lock:
            kept = self._kept.get(condition.key)
            if kept is not None:
                self._kept.move_to_end(condition.key)
                return kept[1]
        for _ in range(_TRIES):
            version = self._version
            mask = self._compute(condition)
            with self._lock:
                if version == self._version:
                    return self._keep(condition, mask)
        with self._lock:  # writes came at each try: hold the next one back
            return self._keep(condition, self._compute(condition))

    def _compute(self, condition: Filter) -> Flags:
        numbers = self._documents.matching(condition)
        mask = np.zeros(max(self._documents.next_number, int(numbers.max(initial=0)) + 1), np.bool_)
        mask[numbers] = True
        return mask

    def _keep(self, condition: Filter, mask: Flags) -> Flags:
        self._kept[condition.key] = condition, mask
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return mask

    def extend(self, documents: Iterable[tuple[int, Attributes]]) -> None:
        """Judge documents, (number, attributes), that are about to be published, by all kept filters."""
        fresh = list(documents)
        with self._lock:
            self._version += 1
            if not fresh:
                return
            needed = max(number for number, _ in fresh) + 1
            for key, (condition, old) in self._kept.items():
                mask = old
                if needed > len(mask):
                    mask = np.zeros(max(needed, len(mask) * 5 // 4), np.bool_)
                    mask[: len(old)] = old
                    self._kept[key] = condition, mask
                for number, values in fresh:
                    mask[number] = condition.matches(values)
