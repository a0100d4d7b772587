"""The lanes and workers of a mesh snapshot as the API shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.bus import LaneState
from common.cost.finish import Queue
from common.cost.linear import LinearCost
from common.wire.registry import StepRecord, WorkerRecord
from services.router.mesh.recent_batches import RecentBatches
from services.router.mesh.snapshot import FamilyState


def lanes_of(states: Iterable[FamilyState], models: dict[str, str]) -> list[dict[str, Any]]:
    """Return every lane; the lanes of all searches are one lane. `models` maps a family's name to its model."""
    found: dict[str, dict[str, Any]] = {}
    for family, lanes, workers, shards, _ in states:
        for cls in [name for name in lanes if not name.startswith("w.")]:
            kind = family.kind
            name = f"search:{cls}" if kind == "search" else f"{family}:{cls}"
            serving = [record for record, alive in workers if alive and cls in record.classes]
            own = [lanes[w] for r in serving if (w := f"w.{r.worker}") in lanes]
            lane = found.setdefault(name, _empty(name, kind, cls, models.get(family.name)))
            lane["shards"] += shards
            _add(lane, lanes[cls], own, serving)
    return list(found.values())


def _empty(name: str, kind: str, cls: str, model: str | None) -> dict[str, Any]:
    return {
        "lane": name,
        "kind": kind,
        "class": cls,
        "model": model,
        "items": {"used": 0, "depth": 0},
        "tokens": {"used": 0, "depth": 0},
        "oldest_age_s": 0.0,
        "pending": 0,
        "held_s": None,
        "workers": 0,
        "shards": 0,
    }


def _add(
    lane: dict[str, Any], state: LaneState, own: list[LaneState], serving: list[WorkerRecord]
) -> None:
    every = [state, *own]
    lane["items"]["used"] += sum(one.items for one in every)
    lane["tokens"]["used"] += sum(one.tokens for one in every)
    lane["items"]["depth"] += state.depth_items
    lane["tokens"]["depth"] += state.depth_tokens
    lane["oldest_age_s"] = max(lane["oldest_age_s"], *(one.oldest_age_s for one in every))
    lane["pending"] += sum(one.pending for one in every)
    processes = {process_of(record) for record in serving}
    lane["workers"] = max(lane["workers"], len(processes))
    planning = [record for record in serving if record.limit_items and not record.draining]
    if planning:
        used = lane["items"]["used"], lane["tokens"]["used"]
        lane["held_s"] = round(_held_s(*used, planning), 6)


def _held_s(items: int, tokens: int, workers: list[WorkerRecord]) -> float:
    """Return the predicted seconds of `items` and `tokens` in the largest batches of workers that share this work."""
    n = len(workers)
    costs = [_cost(record) for record in workers]
    mean = LinearCost(*(sum(parts) / n for parts in zip(*costs, strict=True)))
    queue = Queue(
        mean,
        n,
        limit_items=max(record.limit_items for record in workers),
        limit_tokens=max(record.limit_tokens for record in workers),
    )
    ahead_s = mean.alpha_items_s * items + mean.alpha_tokens_s * tokens
    return (ahead_s + mean.beta_s * queue.batches(items, tokens)) / n


def _cost(record: WorkerRecord) -> LinearCost:
    return LinearCost(record.beta_s, record.alpha_items_s, record.alpha_tokens_s)


def open_queries(record: WorkerRecord, hop_s: float) -> int:
    """Return the number of queries that may arrive at any time and still end within the objective; 0 for no encoder.

    D_o = floor((slo - hop - 2 beta - margin) / alpha): a query that arrives just after a batch began waits for it.
    """
    spare_s = hop_s + record.late_s + record.beta_s
    return _cost(record).queries(record.slo_s, spare_s) if record.slo_s else 0


def process_of(record: WorkerRecord) -> str:
    """Return a worker's name without its incarnation: its role, host and process."""
    return record.worker.rsplit("-", 1)[0]


def workers_of(
    states: Iterable[FamilyState], models: dict[str, str], batches: RecentBatches, hop_s: float
) -> list[dict[str, Any]]:
    """Return every worker, one per process and model, lost workers last; the shards of a process are one worker.

    `hop_s` is the time from a job's end to its client, which depths in queries take into account.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for family, _, workers, shards, steps in states:
        kind = family.kind
        of = family.name if family.name in models else kind
        alive_here = {process_of(record) for record, alive in workers if alive}
        for record, alive in workers:
            process = process_of(record)
            if not alive and process in alive_here:
                continue  # a former incarnation of a process that lives
            shown = _worker(record, alive=alive, kind=kind, model=models.get(family.name))
            shown["shards"] = shards
            shown["family"] = str(family) if family.name in models else None
            shown["depth"]["queries_open"] = open_queries(record, hop_s)
            shown["measured"] = batches.points(family, record.worker)
            shown["tokens_lately"] = batches.tokens(family, record.worker)
            if (step := steps.get(record.worker)) is not None:
                shown["step"] = _step(step)
            known = found.setdefault((process, of), shown)
            if known is not shown:
                _join(known, shown)
    return sorted(found.values(), key=lambda w: (w["state"] == "lost", w["service"], w["name"]))


def _worker(record: WorkerRecord, *, alive: bool, kind: str, model: str | None) -> dict[str, Any]:
    last = {"items": record.batch_items, "tokens": record.batch_tokens, "seconds": record.batch_s}
    state = "draining" if record.draining else "ready"
    return {
        "name": record.worker,
        "service": record.service,
        "kind": kind,
        "classes": list(record.classes),
        "model": model,
        "device": record.device,
        "state": state if alive else "lost",
        "started": record.started_ms / 1000,
        "depth": {
            "items": record.depth_items,
            "tokens": record.depth_tokens,
            "queries": record.depth_queries,
        },
        "cost": {
            "alpha_items_s": record.alpha_items_s,
            "alpha_tokens_s": record.alpha_tokens_s,
            "beta_s": record.beta_s,
            "r2": record.r2,
            "late_s": record.late_s,
            "late_share": record.late_share,
            "slo_s": record.slo_s,
        },
        "batches": record.batches,
        "last_batch": last if record.batches else None,
    }


def _step(step: StepRecord) -> dict[str, Any]:
    return {
        "at": step.at_ms / 1000,
        "why": step.why,
        "decoded": step.decoded,
        "on_host": step.on_host,
        "host_share": step.host_share,
        "predicted_s": step.predicted_s,
        "measured_s": step.measured_s,
        "slack_s": {"long": step.long_slack_s, "short": step.short_slack_s},
        "idle_s": {"device": step.device_idle_s, "host": step.host_idle_s},
        "layers": step.layers,
        "stages": [
            [each.stage, each.part, each.layer, round(each.begin_s, 7), round(each.end_s, 7)]
            for each in step.stages
        ],
        "resumed": step.resumed,
    }


def _join(known: dict[str, Any], other: dict[str, Any]) -> None:
    """Add to a worker the worker of another family in the same process."""
    if other["state"] == "ready" or known["state"] == "lost":
        known["state"] = other["state"]
    known["shards"] += other["shards"]
    if other["batches"] > known["batches"]:
        known["last_batch"] = other["last_batch"]
    known["batches"] += other["batches"]
    for unit in ("items", "tokens"):
        known["depth"][unit] += other["depth"][unit]
