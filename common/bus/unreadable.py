"""Entries of streams that cannot be decoded: the reader counts and logs each of them, skips it and goes on."""

from __future__ import annotations

from common import log
from common.bus import metrics
from common.wire.message import BadMessage, decode
from common.wire.results import Event

_log = log.get("bus")


def note(stream: str, why: str, **more: object) -> None:
    """Count and log one skipped entry; `stream` is the kind of stream, `why` the fault."""
    metrics.BAD_ENTRIES.labels(stream).inc()
    _log.error("bad_entry", stream=stream, why=why, **more)


def event_of(raw: bytes) -> Event | None:
    """Decode an entry of a job's log; None, counted and logged, if the entry is no event."""
    try:
        return decode(raw, Event)
    except BadMessage as error:
        note("log", str(error))
        return None
