"""Tuning of a collection's index: the goal, the explored settings, and the chosen plan."""

from __future__ import annotations

from typing import Literal

import msgspec

from common.wire.message import Message

TuningState = Literal["asked", "exploring", "building", "done", "failed", "cancelled"]
ENDED: frozenset[TuningState] = frozenset({"done", "failed", "cancelled"})


class TuningGoal(msgspec.Struct, frozen=True):
    """The goal of a tuning: the share of true neighbours to find, and bounds, None for no bound.

    `p99_s` bounds the seconds of 99 of 100 single searches, `memory_bytes` the memory of one shard.
    """

    recall: float
    p99_s: float | None = None
    memory_bytes: int | None = None


class IndexSetting(msgspec.Struct, frozen=True, order=True):
    """The kind and the parameters of an index; parameters of other kinds are 0.

    `effort` is the number of lists read (nprobe) or of candidates kept (ef), `depth` the number of rows compared
    exactly for each returned row, `links` a graph's M. Rows in lists have codes of `code_bits` bits; `rotate` rotates
    rows before (OPQ). Other kinds of index ignore the last two.
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
    """A setting, its recall in real indexes of a sample, its predictions, and the reason if it was excluded.

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
    """The setting that a tuning chose for `rows` rows, and the recall that it must reach."""

    tuning: str
    setting: IndexSetting
    recall: float
    rows: int


class MeasuredPlan(msgspec.Struct, frozen=True):
    """The measured index of a plan: its recall for queries that the tuning did not use, and times of single searches.

    `effort` is the effort that the built index needs, `error` the standard error of the recall.
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

    The vector_search process `tuner` explores and builds first; if it has died, or no longer holds the first shard,
    another process that holds that shard takes its place. `steps` lists the steps done. `front` are the explored
    settings that no other setting beats.
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
