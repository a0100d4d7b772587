"""The upload of a source into a collection: skips unchanged, stores changed, and removes missing documents.

Nothing is kept between runs: a run compares the source with the stored documents, so an interrupted run is simply run
again. Writes are upserts by id, so a repeated write does no harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from spillway_client import AsyncSpillway, errors

from cli.files import Found, Item, Problem, Skipped
from common.wire.search import document_hash

BATCH_ITEMS = 32
BATCH_BYTES = 96 * 1024
IN_FLIGHT = 4
FIRST_PAUSE_S = 0.5
_OWN_ERRORS = 3
_DELETE_IDS = 500


class Stop(Exception):
    """The run cannot go on; the message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A document that was read, and a remark on it for people."""

    id: str
    reason: str


@dataclass
class Counts:
    """The results of a run, in documents; `failed` lists failures with reasons, `skipped` files that are no documents.

    `noted` lists remarks on documents that were read; `files` counts the handled files, each once for any number of
    parts.
    """

    stored: int = 0
    unchanged: int = 0
    removed: int = 0
    chunks: int = 0
    failed: list[Problem] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    noted: list[Noted] = field(default_factory=list)
    files: int = 0


News = Problem | Skipped | Noted
Notice = Callable[[Counts, News | None], None]


@dataclass
class _Batch:
    items: list[Item] = field(default_factory=list)
    unchanged: int = 0
    unchanged_files: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Noted] = field(default_factory=list)
    end: bool = False


class Upload:
    """The upload of one source into one collection; it waits up to `patience_s` seconds for a silent server."""

    def __init__(
        self,
        client: AsyncSpillway,
        collection: str,
        source: str,
        *,
        counts: Counts,
        notice: Notice,
        patience_s: float = 300.0,
    ) -> None:
        self._client = client
        self._documents = client.documents(collection)
        self._source = source
        self._counts = counts
        self._notice = notice
        self._patience_s = patience_s
        self._answered_at = time.monotonic()
        self._stored: dict[str, str] = {}
        self._seen: set[str] = set()
        self._hidden: list[str] = []
        self._read: set[str] = set()

    async def run(
        self, found: Iterator[Found], *, prune: Callable[[str], bool] | None = None
    ) -> None:
        """Store what `found` yields; then remove the source's other documents for which `prune` is true.

        Parts that a document no longer has are removed in any case. Raises Stop if the server stays away or refuses
        everything.
        """
        listing = self._documents.iterate(filter={"source": self._source}, page=1000)
        self._stored = {document.id: document.hash async for document in listing}
        room = asyncio.Semaphore(IN_FLIGHT)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    batch = await asyncio.to_thread(self._next, found)
                    self._note(batch)
                    if batch.items:
                        await room.acquire()
                        pushed = tasks.create_task(self._push(batch.items))
                        pushed.add_done_callback(lambda _: room.release())
                    if batch.end:
                        break
        except ExceptionGroup as group:
            raise _first(group) from None
        await self._prune(prune or (lambda _: False))

    def _next(self, found: Iterator[Found]) -> _Batch:
        """Read documents, in a thread, until a batch of changed ones is complete."""
        batch, size = _Batch(), 0
        for item in found:
            self._seen.add(item.id)
            if isinstance(item, Skipped):
                self._seen.discard(item.id)
                batch.skipped.append(item)
            elif isinstance(item, Problem):
                if item.no_text:
                    self._seen.discard(item.id)
                batch.problems.append(item)
            elif self._stored.get(item.id) == document_hash(text=item.text, metadata=item.metadata):
                batch.unchanged += 1
                batch.unchanged_files += item.begins
            else:
                batch.items.append(item)
                size += len(item.text)
            if isinstance(item, Item):
                self._read.add(item.id)
                batch.notes += [Noted(item.id, item.note)] if item.note else []
            named = len(batch.skipped) + len(batch.problems)
            looked_at = len(batch.items) + batch.unchanged + named
            if len(batch.items) >= BATCH_ITEMS or size >= BATCH_BYTES or looked_at >= 1000:
                return batch
        batch.end = True
        return batch

    def _note(self, batch: _Batch) -> None:
        self._counts.unchanged += batch.unchanged
        self._counts.files += batch.unchanged_files
        for noted in batch.notes:
            self._counts.noted.append(noted)
            self._notice(self._counts, noted)
        for skipped in batch.skipped:
            self._counts.skipped.append(skipped)
            self._counts.files += not skipped.id.endswith("/")
            self._notice(self._counts, skipped)
        for problem in batch.problems:
            self._fail(problem)
        self._notice(self._counts, None)

    def _fail(self, problem: Problem) -> None:
        if problem.folder:
            self._hidden.append(problem.id.rstrip("/") + "/")
        elif not problem.no_text:
            self._hidden.append(problem.id + "#")  # its parts stay, too
        self._counts.failed.append(problem)
        self._counts.files += not problem.folder
        self._notice(self._counts, problem)

    async def _push(self, items: Sequence[Item]) -> None:
        """Store a batch through outages; a document that cannot be stored is found by halving, and reported."""
        own_errors, pause_s = 0, FIRST_PAUSE_S
        while items:
            try:
                await self._store(items)
                return
            except (
                errors.AuthenticationError,
                errors.PermissionDeniedError,
                errors.NotFoundError,
                errors.ConflictError,
            ) as error:
                raise Stop(str(error)) from error
            except (
                errors.APIConnectionError,
                errors.RateLimitError,
                errors.UnavailableError,
            ) as error:
                if time.monotonic() - self._answered_at > self._patience_s:
                    raise Stop(_gave_up(self._patience_s, error)) from error
                wait_s = getattr(error, "retry_after_s", None)
                await asyncio.sleep(min(wait_s if wait_s is not None else pause_s, 30.0))
                pause_s = min(pause_s * 2, 8.0)
            except errors.SpillwayError as error:
                own_errors += _may_pass(error)
                if _may_pass(error) and own_errors < _OWN_ERRORS:
                    await asyncio.sleep(pause_s)
                    continue
                if len(items) == 1:
                    self._fail(Problem(items[0].id, str(error)))
                    return
                middle = len(items) // 2
                await self._push(items[:middle])
                items, own_errors = items[middle:], 0

    async def _store(self, items: Sequence[Item]) -> None:
        size = sum(len(item.text) for item in items)
        documents = [{"id": i.id, "text": i.text, "metadata": i.metadata} for i in items]
        written = await self._documents.add(
            documents, timeout_s=min(600.0, 60.0 + size / 4096, self._patience_s)
        )
        self._answered_at = time.monotonic()
        self._counts.files += sum(item.begins for item in items)
        for document in written.data:
            self._counts.stored += document.status != "unchanged"
            self._counts.unchanged += document.status == "unchanged"
            self._counts.chunks += document.chunks
        self._notice(self._counts, None)

    async def _prune(self, prune: Callable[[str], bool]) -> None:
        gone = [
            id_
            for id_ in self._stored
            if id_ not in self._seen
            and not id_.startswith(tuple(self._hidden))
            and (prune(id_) or self._is_stale_part(id_))
        ]
        for start in range(0, len(gone), _DELETE_IDS):
            ids = gone[start : start + _DELETE_IDS]
            await self._documents.delete(ids, timeout_s=self._patience_s)
            self._counts.removed += len(ids)
            self._notice(self._counts, None)

    def _is_stale_part(self, document_id: str) -> bool:
        """Return whether an id is a part (`name#n`) that its document, which was read, no longer has."""
        name, mark, number = document_id.rpartition("#")
        return bool(mark) and number.isdigit() and name in self._read


def _may_pass(error: errors.SpillwayError) -> bool:
    """True for an error that is the server's failure, not the document's fault."""
    return isinstance(error, errors.InternalServerError) and error.code != "job_failed"


def _gave_up(patience_s: float, error: Exception) -> str:
    return (
        f"nothing could be stored for {patience_s:.0f} s ({error}); what was stored stays, and the same command"
        " goes on from there"
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error of a group to show: a Stop if there is one."""
    for error in group.exceptions:
        if isinstance(error, Stop):
            return error
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
