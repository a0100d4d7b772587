"""Ids of requests and jobs: they contain their family, so that any router finds them.

A request's id is `<family name>~<partition>~<ulid>`; a job of a later stage appends `.<stage>.<index>` to its
request's ulid under its own family, so repeating a stage finds the job that exists.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from common.clock import SYSTEM

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [first + second for first in _CROCKFORD for second in _CROCKFORD]
_NAME = r"[a-z0-9][a-z0-9._-]{0,100}"
_FAMILY = re.compile(rf"^({_NAME})/(\d{{1,4}})$")
_JOB = re.compile(
    rf"^({_NAME})~(\d{{1,4}})~([0-9a-hjkmnp-tv-z]{{26}}(?:\.[a-z]{{1,16}}\.\d{{1,6}})?)$"
)


class Family(NamedTuple):
    """Kind and model (or collection shard), and partition: the Redis hash tag and unit of atomicity."""

    name: str
    partition: int = 0

    def __str__(self) -> str:
        return f"{self.name}/{self.partition}"

    @property
    def kind(self) -> str:
        """The kind of work of the family: embed, rerank, chat, search, request or sessions."""
        return self.name.split(".", maxsplit=1)[0]

    @classmethod
    def parse(cls, text: str) -> Family:
        """Parse `embed.minilm/0`; ValueError names the wrong part."""
        match = _FAMILY.match(text)
        if match is None:
            raise ValueError(f"family {text!r}: expected <lower-case name>/<partition>")
        return cls(match[1], int(match[2]))


def ulid(now_ms: int | None = None) -> str:
    """Return 26 characters that sort by time (48 bits of ms, 80 of randomness)."""
    value = (
        (now_ms if now_ms is not None else SYSTEM.unix_ns() // 1_000_000) << 80
    ) | int.from_bytes(os.urandom(10), "big")
    return "".join([_PAIRS[value >> shift & 1023] for shift in range(120, -1, -10)])


def time_of(unique: str) -> int:
    """Return the milliseconds since the epoch at which a ulid (or an id's unique part) was made."""
    value = 0
    for letter in unique[:10]:
        value = value << 5 | _CROCKFORD.index(letter)
    return value


def job_id(family: Family, unique: str) -> str:
    """Return the id of a job whose unique part is a ulid or `<ulid>.<stage>.<index>`."""
    return f"{family.name}~{family.partition}~{unique}"


def child_id(request: str, family: Family, stage: str, index: int) -> str:
    """Return the id of one job of a request's stage; a repeated stage has the same ids."""
    return job_id(family, f"{unique_of(request)}.{stage}.{index}")


def family_of(job: str) -> Family:
    """Return the family that an id contains; ValueError if the text is no id."""
    match = _JOB.match(job)
    if match is None:
        raise ValueError(f"id {job!r}: expected <family>~<partition>~<ulid>[.<stage>.<index>]")
    return Family(match[1], int(match[2]))


def unique_of(job: str) -> str:
    """Return the part of an id after its family."""
    family_of(job)
    return job.rsplit("~", 1)[1]
