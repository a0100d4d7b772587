"""The memory that a generator's host gets: as configured, a small part of a CPU's, or as the executor decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine import random_models
from common.config import WorkerConfig
from engine.kernels import page_memory
from services.adapters.generate.generator import HOST_PART, _host_bytes, _loaded

KV_BYTES = 1 << 20


def _config(directory: Path, **more: object) -> WorkerConfig:
    settings = {"chat_model": str(directory), "device": "cpu", "kv_bytes": KV_BYTES} | more
    return WorkerConfig(**settings)  # type: ignore[arg-type]


def test_a_cpus_host_gets_a_small_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are the device's memory too, so that they only lie on the way to the tiers below."""
    random_models.write(tmp_path, "llama", random_models.settings("llama", 2))
    shape = _loaded(_config(tmp_path)).shape

    assert 0 < shape.host_pages == int(HOST_PART * shape.pages)
    monkeypatch.setattr(page_memory, "available_memory", lambda: 1 << 30)
    free = _host_bytes(_config(tmp_path, kv_bytes=0), attends=False)
    assert free == int(HOST_PART * page_memory.SHARE_CPU * (1 << 30))


def test_what_is_configured_is_taken(tmp_path: Path) -> None:
    """A size that is given is the host's, also none; where the host attends, the executor decides."""
    for size in (0, 123):
        assert _host_bytes(_config(tmp_path, host_kv_bytes=size), attends=False) == size
    assert _host_bytes(_config(tmp_path), attends=True) is None
