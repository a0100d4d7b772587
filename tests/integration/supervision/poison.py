"""Entries that no service can read, and the streams of a mesh to put them into."""

from __future__ import annotations

from typing import Any

from common.bus import Bus
from common.ids import Family, job_id, ulid
from common.wire.jobs import EmbedWork, GenerateWork
from common.wire.message import encode
from common.wire.sessions import SessionWork
from common.wire.workflows import RequestWork

Fields = list[bytes | str | int]
START_S = 100.0


def lane_poison(family: Family) -> dict[str, Fields]:
    """Return malformed entries of a lane by what is wrong with them."""
    good: dict[str, bytes | str | int] = {
        "j": job_id(family, ulid()),
        "p": b"\xc1 no message",
        "i": 1,
        "n": 1,
        "d": 1 << 44,
        "r": "nobody",
        "s": 0,
        "b": 0,
        "u": 0,
        "f": 0,
    }

    def entry(**changed: bytes | str | int | None) -> Fields:
        fields = good | {"j": job_id(family, ulid())} | changed
        return [part for pair in fields.items() if pair[1] is not None for part in pair]  # type: ignore[misc]

    other = Family("other.family", 7)
    generate = GenerateWork(fingerprint="f", scope="s", prompts=[[1, 2]], max_new=4)
    known = {
        "embed": EmbedWork(fingerprint="f", tokens=[[1]]),
        "generate": generate,
        "request": RequestWork(kind="search", tenant="t", body=b"\xc1"),
        "session": SessionWork(op="list", tenant="t"),
    }
    return {
        "one strange field": ["x", "y"],
        "no job": entry(j=None),
        "no payload": entry(p=None),
        "job is no id": entry(j="no id"),
        "job is no text": entry(j=b"\xff\xfe"),
        "job of another family": entry(j=job_id(other, ulid())),
        "number is no number": entry(i="many"),
        "number below zero": entry(n=-5),
        "number without end": entry(i="9" * 400),
        "number with letters": entry(i="1_0"),
        "deadline is no number": entry(d="tomorrow"),
        "suspicions missing": entry(s=None),
        "large": entry(j=None, p=b"x" * 200_000),
        "payload of no job": entry(),
        **{f"{name} of no job": entry(p=encode(work)) for name, work in known.items()},
    }


# Malformed entries of every stream that is no lane: journals, writes, deletions, dead letters.
STREAM_POISON: list[Fields] = [
    ["x", "y"],
    ["j", b"\xff\xfe", "i", "x", "e", b"\xc1"],
    ["w", b"\xc1 no write"],
    ["s", b"short"],
    ["s", b"\xff" * 16, "p", b"odd"],
]
LOG_POISON = [b"", b"\xc1 no event", b"\x80"]


async def streams(bus: Bus) -> list[str]:
    """Return the names of all streams there are."""
    found: list[str] = []
    for call in bus.connection.callers():
        cursor: Any = b"0"
        while True:
            cursor, names = await call("SCAN", cursor, "TYPE", "stream", "COUNT", 1000)
            found += [name.decode() for name in names]
            if int(cursor) == 0:
                break
    return sorted(set(found))


def family_of_key(name: str) -> Family:
    """Return the family whose hash tag a key bears."""
    return Family.parse(name[1:].partition("}")[0])
