"""What the panel of accelerator and overflow is told: points, tokens, depths, work held, and the last minute."""

from __future__ import annotations

import msgspec
import pytest

from common.bus import LaneState
from common.ids import Family
from common.wire.registry import WorkerRecord
from services.router import metrics
from services.router.mesh.recent_batches import KEPT, LATELY_S, RecentBatches
from services.router.mesh.recent_counts import EVERY_S, MINUTE_S, RecentCounts
from services.router.mesh.report import lanes_of, open_queries, workers_of
from services.router.mesh.snapshot import FamilyState
from tests.support.clock import ManualClock

FAMILY = Family("embed.m")
MODELS = {"embed.m": "m"}
# The line of WindVE's V100: 96 queries of 75 tokens in 2 s.
V100 = WorkerRecord(
    worker="gpu-host-1-a",
    classes=["gpu"],
    device="cuda",
    depth_items=300,
    depth_tokens=9000,
    alpha_tokens_s=0.018 / 75,
    beta_s=0.27,
    limit_items=256,
    limit_tokens=8192,
    slo_s=2.0,
    depth_queries=96,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def ran(count: int, *last: float, total: int = 0) -> WorkerRecord:
    """V100 after `count` batches of `total` tokens, the last of them of these items, tokens and seconds."""
    items, tokens, seconds = last
    told = {"batch_items": int(items), "batch_tokens": int(tokens), "batch_s": seconds}
    return msgspec.structs.replace(V100, batches=count, tokens=total, **told)


def test_a_batch_is_noted_once(clock: ManualClock) -> None:
    """Records that tell of the same batch again, or of none yet, add nothing."""
    batches = RecentBatches(clock)
    for record in (V100, ran(1, 2, 60, 0.3), ran(1, 2, 60, 0.3), ran(4, 8, 900, 0.5)):
        batches.note(FAMILY, [record])

    assert batches.points(FAMILY, V100.worker) == [(2, 60, 0.3), (8, 900, 0.5)]


def test_points_are_bounded_and_forgotten(clock: ManualClock) -> None:
    """The latest KEPT stay; those of a worker that nobody remembers go, those of another family do not."""
    batches, other = RecentBatches(clock), Family("embed.n")
    batches.note(other, [ran(1, 1, 10, 0.1)])
    for count in range(1, KEPT + 50):
        batches.note(FAMILY, [ran(count, count, 10, 0.1)])
    points = batches.points(FAMILY, V100.worker)
    assert [len(points), points[0][0], points[-1][0]] == [KEPT, 50, KEPT + 49]

    batches.note(FAMILY, [])
    assert batches.points(FAMILY, V100.worker) == []
    assert batches.points(other, V100.worker) == [(1, 10, 0.1)]


def test_tokens_of_the_last_minute(clock: ManualClock) -> None:
    """What ran between two looks counts, seen or not; what ran before the first look is not known."""
    batches = RecentBatches(clock)
    batches.note(FAMILY, [ran(500, 8, 800, 0.5, total=9000)])
    assert batches.tokens(FAMILY, V100.worker) == 0
    clock.now_s += 1
    batches.note(FAMILY, [ran(503, 8, 100, 0.3, total=9900)])
    clock.now_s += LATELY_S - 1
    batches.note(FAMILY, [ran(504, 8, 50, 0.3, total=9950)])
    assert batches.tokens(FAMILY, V100.worker) == 950
    clock.now_s += 2
    assert batches.tokens(FAMILY, V100.worker) == 50


@pytest.mark.parametrize(
    ("hop_s", "late_s", "depth"),
    [(0.0, 0.0, 81), (0.02, 0.0, 80), (0.02, 0.1, 74), (0.5, 1.0, 0)],
)
def test_the_open_loop_depth(hop_s: float, late_s: float, depth: int) -> None:
    """floor((slo - hop - 2 beta - margin) / alpha), and 0 where not even one query would end in time."""
    record = msgspec.structs.replace(V100, late_s=late_s)
    assert open_queries(record, hop_s) == depth


def test_depths_of_what_is_no_encoder() -> None:
    """A worker without an objective has none."""
    assert open_queries(msgspec.structs.replace(V100, slo_s=0.0, beta_s=0.0), 0.0) == 0


def state(*workers: WorkerRecord, items: int = 0, tokens: int = 0) -> FamilyState:
    lane = LaneState(items, tokens, 300, 9000, 0.0, 0)
    return FamilyState(FAMILY, {"gpu": lane}, [(worker, True) for worker in workers])


def test_the_work_a_lane_holds() -> None:
    """Its predicted seconds in largest batches, shared by its workers; unknown where nobody plans batches."""
    second = msgspec.structs.replace(V100, worker="gpu-host-2-a")
    leaving = msgspec.structs.replace(V100, worker="gpu-host-3-a", draining=True)
    chat = msgspec.structs.replace(V100, limit_items=0)

    def held(*workers: WorkerRecord, items: int = 300) -> float | None:
        lanes = lanes_of([state(*workers, items=items, tokens=items * 75)], MODELS)
        found: float | None = lanes[0]["held_s"]
        return found

    assert held(V100) == pytest.approx(300 * 0.018 + 3 * 0.27)  # 22,500 tokens are three batches
    assert held(V100, second, leaving) == pytest.approx((300 * 0.018 + 3 * 0.27) / 2)
    assert held(V100, items=0) == 0
    assert held(chat) is None
    assert held() is None


def test_a_worker_as_it_is_told(clock: ManualClock) -> None:
    """With its fitted cost, both depths in queries, and what was measured."""
    batches = RecentBatches(clock)
    batches.note(FAMILY, [V100])
    record = msgspec.structs.replace(
        ran(2, 8, 600, 0.41, total=1200), r2=0.98, late_s=0.1, late_share=0.2
    )
    batches.note(FAMILY, [record])
    [told] = workers_of([state(record)], MODELS, batches, hop_s=0.02)

    assert told["family"] == "embed.m/0"
    assert told["depth"] == {"items": 300, "tokens": 9000, "queries": 96, "queries_open": 74}
    assert [told["cost"][name] for name in ("r2", "late_s", "late_share", "slo_s")] == [
        0.98,
        0.1,
        0.2,
        2.0,
    ]
    assert (told["measured"], told["tokens_lately"]) == ([(8, 600, 0.41)], 1200)


def test_a_worker_of_searches_tells_its_shards_and_no_family(clock: ManualClock) -> None:
    """Those of all its families are one worker's."""
    searches = [FamilyState(Family("search", n), {}, [(V100, True)], 2 + n) for n in range(2)]
    [told] = workers_of(searches, MODELS, RecentBatches(clock), hop_s=0.0)
    assert (told["family"], told["shards"]) == (None, 5)


def test_the_last_minute(clock: ManualClock) -> None:
    """What the door took, by lane, and refused within it; older counts are not among them."""
    lane = "embed.minute/0:cpu"
    window = RecentCounts(clock)

    def gained() -> tuple[dict[str, int], dict[str, int]]:
        told = window.minute()
        admitted = {one["lane"]: one["count"] for one in told["admitted"]}
        return admitted, {one["reason"]: one["count"] for one in told["refused"]}

    window.note()
    metrics.ADMITTED.labels(lane).inc(3)
    metrics.REFUSED.labels("deadline").inc(2)
    assert gained() == ({lane: 3}, {"deadline": 2})
    for _ in range(int(MINUTE_S / EVERY_S) + 1):
        clock.now_s += EVERY_S
        window.note()
    assert gained() == ({}, {})
    metrics.ADMITTED.labels(lane).inc()
    assert gained() == ({lane: 1}, {})
    assert window.minute()["seconds"] == MINUTE_S
