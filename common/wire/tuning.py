"""Tuning of a collection's index: the goal, the settings that were explored, and the plan that was chosen."""

from __future__ import annotations

from typing import Literal

import msgspec

from common.wire.message import Message

TuningState = Literal["asked", "exploring", "building", "done", "failed", "cancelled"]
ENDED: frozenset[TuningState] = frozenset({"done", "failed", "cancelled"})


class TuningGoal(msgspec.Struct, frozen=True):
    """What an index must reach: the share of true neighbours found, and bounds that may be missing.

    `p99_s` bounds the seconds of 99 of 100 single searches, `memory_bytes` what one shard holds in memory.
    """

    recall: float
    p99_s: float | None = None
    memory_bytes: int | None = None


class IndexSetting(msgspec.Struct, frozen=True, order=True):
    """An index's kind and parameters; those of other kinds are 0.

    `effort` is how many lists are read (nprobe) or candidates kept (ef), `depth` how many rows are compared exactly for
    each that is returned, `links` a graph's M. Rows in lists have codes of `code_bits` bits, rotated before or not
    (OPQ); of other kinds these two say nothing.
    """

    kind: Literal["exact", "graph", "ivfpq"]
    lists: int = 0
    links: int = 0
    effort: int = 0
    depth: int = 0
    threads: int = 1
    code_bits: Literal[4, 8] = 8
    rotate: bool = True


class ExploredSetting(msgspec.Struct, frozen=True):
    """A setting, the recall that real indexes had on a sample, what it is predicted to do, and why it is out ("": not).

    `sure` is the recall less two standard errors.
    """

    setting: IndexSetting
    recall: float
    sure: float
    qps: float
    p99_s: float
    bytes: int
    why: str = ""


class IndexPlan(msgspec.Struct, frozen=True):
    """The setting that a tuning chose for so many rows, and the recall that it is to reach."""

    tuning: str
    setting: IndexSetting
    recall: float
    rows: int


class MeasuredPlan(msgspec.Struct, frozen=True):
    """What an index built by a plan does: its recall by queries that tuning never saw, and single searches timed.

    `effort` is what the built index needs, `error` the standard error of the recall.
    """

    recall: float
    error: float
    queries: int
    effort: int = 0
    qps: float = 0.0
    p99_s: float = 0.0
    bytes: int = 0


class CollectionTuning(Message, frozen=True):
    """A tuning of a collection, and the plan in force, which may be of an earlier one.

    The vector_search process `tuner` explores and builds first; where it has died, or the first shard has left it,
    another one that holds that shard takes its place. `steps` tells what was done. `front` are explored settings that
    no other one beats.
    """

    collection: str
    id: str
    goal: TuningGoal
    plan_only: bool = False
    state: TuningState = "asked"
    tuner: str = ""
    steps: list[str] = []
    notes: list[str] = []
    explored: int = 0
    front: list[ExploredSetting] = []
    chosen: ExploredSetting | None = None
    plan: IndexPlan | None = None
    measured: MeasuredPlan | None = None
    in_force: IndexPlan | None = None
    why: str = ""
    began_ms: int = 0
    ended_ms: int = 0
