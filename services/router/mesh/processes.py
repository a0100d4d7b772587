"""The mesh's processes as the API shows them: each process' settings, and the limits of the families it serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.wire.registry import ProcessRecord, WorkerRecord
from services.router.mesh.snapshot import FamilyState


def processes_of(
    processes: Iterable[ProcessRecord], states: Iterable[FamilyState]
) -> list[dict[str, Any]]:
    """Return every living process with the families it serves, matched by the `place` in both records."""
    served: dict[str, list[dict[str, Any]]] = {}
    for state in states:
        for record, alive in state.workers:
            if alive and record.place:
                row = {"family": str(state.family), "kind": state.family.kind, **_limits(record)}
                served.setdefault(record.place, []).append(row)
    return [
        {
            "service": each.service,
            "instance": each.instance,
            "host": each.host,
            "pid": each.pid,
            "cores": each.cores,
            "threads": each.threads,
            "settings": [f"{name}={value}" for name, value in sorted(each.settings.items())],
            "started": each.started_ms / 1000,
            "families": served.get(each.place, []) if each.place else [],
        }
        for each in processes
    ]


def _limits(record: WorkerRecord) -> dict[str, Any]:
    return {
        "device": record.device,
        "batch_items": record.limit_items,
        "batch_tokens": record.limit_tokens,
        "depth_items": record.depth_items,
        "depth_tokens": record.depth_tokens,
    }
