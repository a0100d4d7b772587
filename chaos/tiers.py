"""Page tiers so small that conversations move through all of them, and counts of pages read from each."""

from __future__ import annotations

from collections import Counter

from bench.mesh import probe
from bench.mesh.local_mesh import LocalMesh

# In pages of the shipped model in float32 (320 KiB): 64 on the device, 32 on the host, 80 in Redis, 240 on disk.
SMALL = {
    "SPILLWAY_KV_BYTES": str(20 << 20),
    "SPILLWAY_HOST_KV_BYTES": str(10 << 20),
    "SPILLWAY_PAGES_BYTES": str(25 << 20),
    "SPILLWAY_DISK_BYTES": str(75 << 20),
    "SPILLWAY_PAGE_PUBLISH": "through",
}
COUNTED = (
    "spillway_pages_found_total",
    "spillway_page_move_bytes_total",
    "spillway_unsound_pages_total",
)
# Layers attended on the host, by who attended; shown where there are some.
ATTENDED = "spillway_host_layers_total"


class TierCounts:
    """What the workers of a mesh have counted of their pages, also those that were killed since."""

    def __init__(self) -> None:
        self._dead: Counter[str] = Counter()

    async def keep(self, mesh: LocalMesh, name: str) -> None:
        """Note what a process has counted, which is about to die."""
        self._dead.update(await _of(mesh, name))

    async def total(self, mesh: LocalMesh) -> dict[str, int]:
        """Return each sample of the counters above, by its name and label, summed over all workers."""
        found = Counter(self._dead)
        for name in mesh.services:
            found.update(await _of(mesh, name))
        return dict(found)


async def _of(mesh: LocalMesh, name: str) -> Counter[str]:
    port = mesh.health_port(name)
    found = {} if port is None else await probe.metrics(port)
    return Counter(
        {
            key: int(value)
            for key, value in found.items()
            if key.startswith(COUNTED) or (key.startswith(ATTENDED) and value)
        }
    )


def table(counted: dict[str, int]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows: pages found by tier, and mebibytes moved between tiers."""
    rows = []
    for key, value in sorted(counted.items()):
        metric, _, labels = key.partition("{")
        unit = 2**20 if metric == COUNTED[1] else 1
        what = metric.removeprefix("spillway_").removesuffix("_total").replace("_", " ")
        what = what.replace("bytes", "MiB")
        rows.append([what, labels.split('"')[1], f"{value / unit:,.0f}"])
    return ["of the workers", "tier or move", "count"], rows
