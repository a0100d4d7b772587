"""The processes of a mesh: each publishes its record with its settings, and renews it while it lives."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

import msgspec

from common import log
from common.bus import Bus, BusDown, keys
from common.bus.connection import BusFull
from common.config import Common, WorkerConfig
from common.devices import detect
from common.process_identity import here
from common.redis.replies import hash_of
from common.types.helper_address import channel_kind
from common.wire.message import decode, encode
from common.wire.registry import ProcessRecord

EVERY_S = 2.0
LIVE_S = 7.0  # seconds without a sign of life after which a process is not counted
KEPT_S = 600.0
# Addresses, secrets and paths of the machine, which holders of an API key must not see.
PRIVATE = frozenset(
    {
        "data_dir", "redis_url", "pages_url", "redis_server", "tls_cert", "tls_key", "host_socket",
        "host_secret",
    }
)  # fmt: skip
_THREADS = ("threads", "search_threads", "text_processes")
_log = log.get("bus")


def shown_settings(config: Common) -> dict[str, str]:
    """Return the settings that differ from their defaults, by variable, without private ones.

    A path is shown by its last part, the socket of a helper by its kind.
    """
    default = type(config)()
    found = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if name not in PRIVATE and value != getattr(default, name):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found[f"SPILLWAY_{name.upper()}"] = text.rstrip("/").rpartition("/")[2] or text
    if isinstance(config, WorkerConfig) and config.host_socket:
        found["SPILLWAY_HOST_SOCKET"] = channel_kind(config.host_socket)
    return found


def describe(config: Common, service: str, instance: str, started_ms: int) -> ProcessRecord:
    """Return the record of this process."""
    machine = detect()
    asked = next((getattr(config, name) for name in _THREADS if hasattr(config, name)), 1)
    return ProcessRecord(
        service=service,
        instance=instance,
        host=socket.gethostname(),
        pid=os.getpid(),
        place=here(),
        cores=len(machine.cores),
        threads=asked or machine.usable_cores,
        settings=shown_settings(config),
        started_ms=started_ms,
    )


class Processes:
    """The processes' records, by service, host and process."""

    def __init__(self, bus: Bus) -> None:
        self._redis, self._clock = bus.connection, bus.clock

    async def announce(self, record: ProcessRecord, stopping: asyncio.Event) -> None:
        """Renew a process' record every two seconds until the stop; then remove the record."""
        field = f"{record.service}/{record.host}/{record.pid}"
        while not stopping.is_set():
            try:
                seen = msgspec.structs.replace(record, seen_ms=self._clock.now_ms())
                await self._redis.call("HSET", keys.PROCESSES, field, encode(seen), timeout_s=0.0)
                if record.service == "router":
                    await self._forget_old()
            except (BusDown, BusFull):
                pass  # the next round may reach Redis
            try:
                await asyncio.wait_for(stopping.wait(), EVERY_S)
            except TimeoutError:
                continue
        try:
            await self._redis.call("HDEL", keys.PROCESSES, field, timeout_s=0.0)
        except BusDown:
            _log.warning("process_left_announced", process=field)

    async def living(self) -> list[ProcessRecord]:
        """Return the records of the processes that live, by service and instance."""
        now = self._clock.now_ms()
        found = [each for _, each in await self._all() if now - each.seen_ms <= 1000 * LIVE_S]
        return sorted(found, key=lambda each: (each.service, each.instance, each.host, each.pid))

    async def _all(self) -> list[tuple[str, ProcessRecord]]:
        rows: Mapping[bytes, bytes] = hash_of(await self._redis.call("HGETALL", keys.PROCESSES))
        return [(name.decode(), decode(raw, ProcessRecord)) for name, raw in rows.items()]

    async def _forget_old(self) -> None:
        """Remove the records of processes that died long ago."""
        least = self._clock.now_ms() - 1000 * KEPT_S
        if old := [name for name, each in await self._all() if each.seen_ms < least]:
            await self._redis.call("HDEL", keys.PROCESSES, *old, timeout_s=0.0)
