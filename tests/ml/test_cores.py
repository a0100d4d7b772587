"""The cores a process may use, by cgroup quota and affinity."""

from __future__ import annotations

import os

import pytest

from common.ml.cores import keep_memory, quota_cores, usable_cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000", 2.0),
        ("50000 100000", 0.5),
        ("max 100000", None),
        ("-1 100000", None),
        ("100000 0", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_quota(text: str, cores: float | None) -> None:
    """A quota line gives cores; no quota and nonsense give none."""
    assert quota_cores(text) == cores


def test_affinity_bounds_the_cores() -> None:
    """Never more cores than the process may run on, and at least one."""
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    keep_memory()
