"""What a batch of queries does on the pool: one search for those that ask alike, and an outcome for each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common import log
from common.errors import InvalidRequest, SpillwayError, Unavailable
from common.wire.results import Result
from common.wire.search import DocumentsWork, SearchResult, SearchWork
from services.vector_search import metrics
from services.vector_search.shard import Shard
from services.vector_search.shard_handle import ShardHandle

_log = log.get("vector_search")


def alike(work: SearchWork | DocumentsWork) -> bytes | None:
    """Return what searches must share to run as one batch; None for what runs alone."""
    if isinstance(work, DocumentsWork):
        return None
    return msgspec.msgpack.encode(msgspec.structs.replace(work, vectors=b"", after=None))


def execute(
    unit: ShardHandle, works: Sequence[SearchWork | DocumentsWork]
) -> list[Result | SpillwayError]:
    """Run one batch; what is wrong with one job is its outcome and no other's."""
    first = works[0]
    if len(works) > 1 and isinstance(first, SearchWork):
        try:
            return _together(unit.open(), [work for work in works if isinstance(work, SearchWork)])
        except SpillwayError:
            pass  # one of them is bad: each alone
        except Exception:  # noqa: BLE001 - whose fault it is shows when each runs alone
            _log.exception("queries_failed", collection=unit.collection, shard=unit.number)
    outcomes: list[Result | SpillwayError] = []
    for work in works:
        try:
            shard = unit.open()
            outcomes.append(
                shard.search(work) if isinstance(work, SearchWork) else shard.documents(work)
            )
        except SpillwayError as error:
            outcomes.append(error)
        except Exception as error:  # noqa: BLE001 - one query's failure is its own
            _log.exception("query_failed", collection=unit.collection)
            metrics.FAILURES.inc()
            outcomes.append(
                unit.error
                or Unavailable(f"the search failed: {type(error).__name__}", code="search_failed")
            )
    return outcomes


def _together(shard: Shard, works: list[SearchWork]) -> list[Result | SpillwayError]:
    size = shard.record.dimension * 4
    if any(not work.vectors or len(work.vectors) % size for work in works):
        raise InvalidRequest("a query has another dimension", code="dimension_mismatch")
    joined = msgspec.structs.replace(works[0], vectors=b"".join(work.vectors for work in works))
    found = shard.search(joined)
    outcomes: list[Result | SpillwayError] = []
    at = 0
    for work in works:
        hits = found.hits[at : at + len(work.vectors) // size]
        outcomes.append(SearchResult(hits=hits, applied=found.applied, path=found.path))
        at += len(hits)
    return outcomes
